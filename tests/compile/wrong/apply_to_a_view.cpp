// error: constraint
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"

// Something that can only be looked at cannot be evicted from.
struct View {
  using element_type = float;
  using memory_space = kvevict::host_space;
  kvevict::CacheShape shape() const { return {}; }
  kvevict::index_t tokens(kvevict::index_t, kvevict::index_t) const { return 0; }
  kvevict::Rows<const float> keys(kvevict::index_t, kvevict::index_t) const { return {}; }
  kvevict::Rows<const float> values(kvevict::index_t, kvevict::index_t) const { return {}; }
  std::span<const kvevict::index_t> positions(kvevict::index_t, kvevict::index_t) const { return {}; }
};

#ifdef RIGHT
void evict(kvevict::RaggedCache<float>& cache, const kvevict::EvictionPlan& plan)
#else
void evict(View& cache, const kvevict::EvictionPlan& plan)
#endif
{
  kvevict::apply(kvevict::host_exec{}, plan, cache);
}
