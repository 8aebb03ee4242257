// Carrying a plan out: every layer of the cache is compacted, and the cache gives the memory back.
#pragma once
#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/plan/plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Throws std::invalid_argument where plan and cache have different layers or heads; what a layer's rows must satisfy is
// checked by the cache before that layer changes. O(kept rows).
template <class Exec, class C>
requires KVCache<C, Exec>
void apply(const Exec& exec, const EvictionPlan& plan, C& cache) {
  const CacheShape shape = cache.shape();
  if (plan.layers != shape.layers || plan.heads != shape.kv_heads)
    fail_argument("apply: the plan is for ", plan.layers, " layers of ", plan.heads, " heads, the cache has ",
                  shape.layers, " of ", shape.kv_heads);
  for (index_t l = 0; l < plan.layers; ++l) cache.compact(exec, l, plan.layer(l));
}

}  // namespace kvevict::inline KVEVICT_ABI
