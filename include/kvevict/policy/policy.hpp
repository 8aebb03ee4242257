// Policy: an allocator, a scorer and a selector make an eviction policy. Published policies are combinations with names
// (policy/snapkv.hpp and its neighbours); any other combination is as good.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/policy/planner.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

template <Allocator A, class S, Selector K = TopK>
struct Policy {
  A allocator{};
  S scorer{};
  K selector{};

  // "allocator/scorer", every parameter printed.
  std::string specification() const { return kvevict::specification(allocator) + '/' + kvevict::specification(scorer); }

  // True where a layer's plan needs that layer alone.
  bool layerwise() const { return kind_of(allocator) != AllocatorKind::global; }

  // For a prefill that evicts layer by layer. tokens: [layers * kv_heads], rows before eviction. row_bytes is needed
  // for a budget in bytes only. The planner refers to this policy.
  LayerPlanner<A, S, K> make_planner(const CacheShape& shape, std::span<const index_t> tokens, const Budget& budget,
                                     std::int64_t row_bytes = 0) const {
    return {allocator, scorer, selector, specification(), shape, tokens, budget, row_bytes};
  }

  // The same where `exec` runs; a device's planner comes from its own header (cuda/policy.cuh).
  LayerPlanner<A, S, K> make_planner(const host_exec&, const CacheShape& shape, std::span<const index_t> tokens,
                                     const Budget& budget, std::int64_t row_bytes = 0) const {
    return make_planner(shape, tokens, budget, row_bytes);
  }
  template <DeviceExec Exec>
  auto make_planner(const Exec& exec, const CacheShape& shape, std::span<const index_t> tokens, const Budget& budget,
                    std::int64_t row_bytes = 0) const {
    return make_planner_on(exec, *this, shape, tokens, budget, row_bytes);
  }

  // The whole plan for `view`, from one observation per layer, [layers]. Throws as LayerPlanner does.
  template <KVCacheView C>
  EvictionPlan plan(const host_exec& exec, const C& view,
                    std::span<const LayerObservation<typename C::element_type>> observations,
                    const Budget& budget) const {
    detail::check_observations(observations.size(), view.shape());
    const auto [tokens, row_bytes] = detail::rows_to_plan(view);
    auto planner = make_planner(view.shape(), tokens, budget, row_bytes);
    for (const auto& o : observations) {
      if (planner.layerwise()) planner.layer(exec, o);
      else planner.observe(exec, o);
    }
    return planner.finish(exec);
  }

  // The same on a device, for a cache that lives there.
  template <DeviceExec Exec, KVCacheView C>
  EvictionPlan plan(const Exec& exec, const C& view,
                    std::span<const LayerObservation<typename C::element_type>> observations,
                    const Budget& budget) const {
    return plan_on(exec, *this, view, observations, budget);
  }
};
template <class A, class S, class K>
Policy(A, S, K) -> Policy<A, S, K>;
template <class A, class S>
Policy(A, S) -> Policy<A, S, TopK>;

// What engines and tools ask of a policy.
template <class P>
concept EvictionPolicy = requires(const P& p, const CacheShape& shape, std::span<const index_t> tokens,
                                  const Budget& budget) {
  { p.specification() } -> std::same_as<std::string>;
  { p.layerwise() } -> std::same_as<bool>;
  p.make_planner(shape, tokens, budget);
};

}  // namespace kvevict::inline KVEVICT_ABI
