// Prefill with eviction, layer by layer: inside a layer every token attends to all rows before it; then the policy
// plans for that layer and its cache shrinks before the next layer runs. So no more is ever held than what was kept so
// far and one full layer. A global allocator can plan only after the last layer: then every row is held, and the audit
// says so.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/model/capture.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/plan/plan_options.hpp"
#include "kvevict/policy/policy.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct EvictedPrefill {
  EvictionPlan plan;
  std::int64_t rows_full = 0;  // tokens of all (layer, head) pairs
  std::int64_t rows_peak = 0;  // most rows that the cache held at once, measured
};

// Feeds `tokens` into the empty `cache`, which then holds what the policy keeps; `state` has the residual stream of
// every token, as after an ordinary prefill. `chunk` bounds the working memory and changes no bit. Throws as
// Decoder::feed and the policy's planner do.
template <GrowingCache<host_exec> Cache, EvictionPolicy P>
EvictedPrefill prefill_and_evict(const host_exec& exec, const Decoder& decoder, std::span<const index_t> tokens,
                                 const P& policy, const Budget& budget, Cache& cache, ForwardState& state,
                                 index_t chunk = Decoder::default_chunk) {
  if (cache.next_position() != 0)
    fail_argument("prefill_and_evict: the cache is at position ", cache.next_position(), "; an empty one is required");
  const CacheShape shape = decoder.cache_shape();
  const auto n = static_cast<index_t>(tokens.size());
  const std::vector<index_t> rows(static_cast<std::size_t>(shape.heads_total()), n);
  PlanOptions options;
  options.row_bytes = bytes_per_row<typename Cache::element_type>(shape);
  auto planner = policy.make_planner(exec, shape, rows, budget, options);

  EvictedPrefill out;
  out.rows_full = shape.heads_total() * n;
  std::int64_t held = 0;  // in layers that are done
  CaptureOptions capture;
  capture.add(needs_of(policy.scorer), policy.scorer.window_rows());
  const auto layer_rows = [&](index_t layer) {
    std::int64_t sum = 0;
    for (index_t h = 0; h < shape.kv_heads; ++h) sum += cache.tokens(layer, h);
    return sum;
  };
  const auto plan_layer = [&](const LayerObservation<float>& o) {
    out.rows_peak = std::max(out.rows_peak, held + layer_rows(o.layer));
    if (planner.layerwise()) cache.compact(exec, o.layer, planner.layer(exec, o));
    else planner.observe(exec, o);
    held += layer_rows(o.layer);
  };
  decoder.feed(exec, tokens, cache, state, LayerCapture(exec, decoder, cache, n, capture, plan_layer), chunk);
  out.plan = planner.finish(exec);
  if (!policy.layerwise()) {
    out.plan.audit.add("planned after the last layer: this allocator needs the scores of all, so every row was held");
    apply(exec, out.plan, cache);
  }
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
