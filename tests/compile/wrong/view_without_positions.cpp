// error: constraint
#include <span>

#include "kvevict/observe/observation.hpp"

// A cache that does not say where its rows come from is no KVCacheView.
struct Engine {
  using element_type = float;
  using memory_space = kvevict::host_space;
  kvevict::CacheShape shape() const { return {}; }
  kvevict::index_t tokens(kvevict::index_t, kvevict::index_t) const { return 0; }
  kvevict::Rows<const float> keys(kvevict::index_t, kvevict::index_t) const { return {}; }
  kvevict::Rows<const float> values(kvevict::index_t, kvevict::index_t) const { return {}; }
#ifdef RIGHT
  std::span<const kvevict::index_t> positions(kvevict::index_t, kvevict::index_t) const { return {}; }
#endif
};

auto look(const Engine& engine) { return kvevict::observe_layer(engine, 0, 1.f); }
