// Policy: an allocator, a scorer and a selector make an eviction policy. Published policies are combinations with names
// (policy/snapkv.hpp and its neighbours); any other combination is as good.
#pragma once
#include <concepts>
#include <span>
#include <string>
#include <vector>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/plan/plan_options.hpp"
#include "kvevict/policy/planner.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// Token counts of a cache, [layers * kv_heads].
template <KVCacheView C>
std::vector<index_t> tokens_of(const C& view) {
  const CacheShape shape = view.shape();
  std::vector<index_t> tokens;
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) tokens.push_back(view.tokens(l, h));
  return tokens;
}

}  // namespace detail

template <Allocator A, Scorer S, Selector K = TopK>
struct Policy {
  A allocator{};
  S scorer{};
  K selector{};

  // "allocator/scorer", every parameter printed.
  std::string specification() const { return kvevict::specification(allocator) + '/' + kvevict::specification(scorer); }

  // True where a layer's plan needs that layer alone.
  bool layerwise() const { return kind_of(allocator) != AllocatorKind::global; }

  // For a prefill that evicts layer by layer. tokens: [layers * kv_heads], rows before eviction, in host memory. A
  // device needs its header (cuda/planning.cuh). The planner does not refer to this policy.
  template <PlanningExec Exec>
  [[nodiscard]] LayerPlanner<Exec, A, S, K> make_planner(const Exec& exec, const CacheShape& shape,
                                                         std::span<const index_t> tokens, const Budget& budget,
                                                         const PlanOptions& options = {}) const {
    return {exec, allocator, scorer, selector, specification(), shape, tokens, budget, options};
  }
  [[nodiscard]] LayerPlanner<host_exec, A, S, K> make_planner(const CacheShape& shape, std::span<const index_t> tokens,
                                                              const Budget& budget,
                                                              const PlanOptions& options = {}) const {
    return make_planner(host_exec{}, shape, tokens, budget, options);
  }

  // The whole plan for `view`, from one observation per layer, [layers]. Throws as LayerPlanner does.
  template <PlanningExec Exec = host_exec, KVCacheView C>
  [[nodiscard]] EvictionPlan plan(const Exec& exec, const C& view,
                                  std::span<const LayerObservation<typename C::element_type>> observations,
                                  const Budget& budget, PlanOptions options = {}) const {
    static_assert(C::memory_space::host == !DeviceExec<Exec>, "the cache lies in another memory than exec works in");
    if (std::ssize(observations) != view.shape().layers)
      fail_argument("plan: ", observations.size(), " observations for ", view.shape().layers, " layers");
    options.row_bytes = bytes_per_row<typename C::element_type>(view.shape());
    auto planner = make_planner(exec, view.shape(), detail::tokens_of(view), budget, options);
    for (const auto& o : observations) {
      if (planner.layerwise()) (void)planner.layer(exec, o);
      else planner.observe(exec, o);
    }
    return planner.finish(exec);
  }
};
template <class A, class S, class K>
Policy(A, S, K) -> Policy<A, S, K>;
template <class A, class S>
Policy(A, S) -> Policy<A, S, TopK>;

// What engines and tools ask of a policy: planners, and the inputs that its scorer needs.
template <class P>
concept EvictionPolicy = requires(const P& p, const host_exec& exec, const CacheShape& shape,
                                  std::span<const index_t> tokens, const Budget& budget, const PlanOptions& options) {
  { p.specification() } -> std::same_as<std::string>;
  { p.layerwise() } -> std::same_as<bool>;
  { needs_of(p.scorer) } -> std::same_as<Needs>;
  { p.scorer.window_rows() } -> std::same_as<index_t>;
  p.make_planner(exec, shape, tokens, budget, options);
};

}  // namespace kvevict::inline KVEVICT_ABI
