// Planning on the device: Policy<allocator, scorer> with cuda_exec. Scores, rows per head and selection stay on the
// device; layer() returns a LayerPlan in device memory that a device cache compacts with, and nothing waits between the
// scores and the compacted cache. Equal scores give the plans of the host planner, bit for bit.
//
// Scorers: what score_on(cuda_exec, scorer, observation, scores) is declared for (window_attention.cuh,
// token_network.cuh, simple_scores.cuh). Allocators: every static one, computed on the host from the token counts, and
// Ada-KV (variants exact and kvpress) over any static one. Selector: TopK.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/concepts.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/cuda/key_scorers.cuh"
#include "kvevict/cuda/select.cuh"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/policy/planner.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Scorers that run on the device for element type T.
template <class S, class T>
concept DeviceScorer = requires(const cuda_exec& exec, const S& scorer, const LayerObservation<T>& o,
                                Matrix<float> out) {
  score_on(exec, scorer, o, out);
};

namespace cuda {

template <class A>
struct IsAda : std::false_type {};
template <class Base>
struct IsAda<allocate::Ada<Base>> : std::true_type {};

}  // namespace cuda

// As LayerPlanner, layer by layer. Holds references to the policy's parts: the policy must outlive it.
template <Allocator A, class S>
class CudaPlanner {
  static_assert(StaticAllocator<A> || cuda::IsAda<A>::value,
                "on the device rows are given by a static allocator or by Ada-KV");

 public:
  // tokens: [layers * kv_heads], host memory. row_bytes: bytes of one key and one value row; only a budget in bytes
  // needs it.
  CudaPlanner(const cuda_exec& exec, const A& allocator, const S& scorer, std::string specification,
              const CacheShape& shape, std::span<const index_t> tokens, const Budget& budget, std::int64_t row_bytes)
      : allocator_(allocator), scorer_(scorer), shape_(shape), tokens_(tokens.begin(), tokens.end()), error_(exec) {
    detail::check_planning(scorer, specification, shape, tokens, budget, row_bytes);
    plan_.layers = shape.layers;
    plan_.heads = shape.kv_heads;
    plan_.specification = std::move(specification);
    plan_.asked = budget.description();
    plan_.granted = budget.resolve(tokens_, row_bytes, allocator.minimum_rows, plan_.audit);
    give_rows(exec);
    device_tokens_ = cuda::uploaded(exec, std::span<const index_t>(tokens_));
    offsets_ = cuda::DeviceArray<std::int64_t>(exec, std::int64_t{shape.layers} * (shape.kv_heads + 1));
    indices_ = cuda::DeviceArray<index_t>(exec, first_.back());
  }

  const GrantedBudget& granted() const noexcept { return plan_.granted; }

  // What the observed layer keeps, in device memory, valid while the planner lives. Never waits, so a NaN score is
  // noticed by check() or finish(). Throws std::invalid_argument where the observation is not the next layer, does not
  // fit, or lacks an input of the scorer.
  template <class T>
  LayerPlan layer(const cuda_exec& exec, const LayerObservation<T>& o) {
    static_assert(DeviceScorer<S, T>,
                  "this scorer has no score_on(cuda_exec, ...): include its .cuh, or plan on the host");
    check_layer(o);
    const index_t l = o.layer, heads = shape_.kv_heads, width = o.most_tokens();
    const std::int64_t at = shape_.at(l, 0);
    cuda::ScoredRows rows{nullptr, width, heads, device_tokens_.data() + at, width, at};
    const bool ranked = needs_scores(l);
    if (ranked) {
      check_inputs(plan_.specification, needs_of(scorer_), scorer_.window_rows(), o);
      score_on(exec, scorer_, o, Matrix<float>{score_memory(exec, scores_, width), heads, width, width});
      rows.scores = scores_.data();
    }
    index_t* budgets = budgets_.data() + at;
    const std::int64_t* totals = nullptr;
    if constexpr (cuda::IsAda<A>::value) {
      if (ranked) split_layer(exec, rows, l, budgets);
      if (ranked && allocator_.variant == AdaVariant::exact) totals = totals_.data() + l;
    }
    std::int64_t* offsets = offsets_.data() + std::int64_t{l} * (heads + 1);
    index_t* out = indices_.data() + first_[static_cast<std::size_t>(l)];
    cuda::offsets(exec, rows.tokens, budgets, heads, offsets);
    cuda::select(exec, rows, budgets, scorer_.protection(), offsets, out, error_.word(), totals, heads);
    ++done_;
    return {{{offsets, static_cast<std::size_t>(heads) + 1}, {out, static_cast<std::size_t>(layer_rows(l))}}, {}};
  }

  // Waits for what was planned so far. Throws std::domain_error naming layer, head and token for a NaN score.
  void check(const cuda_exec& exec) { error_.throw_if_set(exec, plan_.specification, shape_.kv_heads); }

  // The whole plan in host memory, after the last layer. Waits. The planner is spent; plans in device memory stay.
  EvictionPlan finish(const cuda_exec& exec) {
    if (done_ != shape_.layers) fail_argument("finish: ", done_, " of ", shape_.layers, " layers were planned");
    check(exec);
    const auto offsets = cuda::downloaded(exec, offsets_.data(), offsets_.size());
    plan_.indices = cuda::downloaded(exec, indices_.data(), indices_.size());
    plan_.offsets = {0};
    const auto stride = static_cast<std::size_t>(shape_.kv_heads) + 1;
    for (std::size_t l = 0; l < static_cast<std::size_t>(shape_.layers); ++l)
      for (std::size_t h = 1; h < stride; ++h) plan_.offsets.push_back(first_[l] + offsets[l * stride + h]);
    note_protection();
    return std::move(plan_);
  }

 private:
  std::span<const index_t> layer_tokens(index_t l) const {
    return std::span(tokens_).subspan(static_cast<std::size_t>(shape_.at(l, 0)),
                                      static_cast<std::size_t>(shape_.kv_heads));
  }
  std::int64_t layer_rows(index_t l) const {
    return first_[static_cast<std::size_t>(l) + 1] - first_[static_cast<std::size_t>(l)];
  }
  bool needs_scores(index_t l) const {
    std::int64_t held = 0;
    for (const index_t t : layer_tokens(l)) held += t;
    return layer_rows(l) < held;
  }

  // Rows of every head, or of every layer: static allocators look at token counts alone, and those are on the host.
  void give_rows(const cuda_exec& exec) {
    const auto heads = static_cast<std::size_t>(shape_.kv_heads);
    std::vector<index_t> rows(tokens_);
    first_.assign(1, 0);
    if constexpr (cuda::IsAda<A>::value) {
      if (allocator_.variant == AdaVariant::reference)
        fail_argument(plan_.specification, ": variant=reference has no device form; exact and kvpress have");
      const Protect p = scorer_.protection();
      if (allocator_.variant == AdaVariant::kvpress && (p.sinks > 0 || p.window > 0) && p.share != ProtectShare::score)
        fail_argument("ada: variant=kvpress ranks the window with the other rows; give the scorer protect=score");
      layer_totals_.resize(static_cast<std::size_t>(shape_.layers));
      allocator_.layer_totals(shape_, tokens_, plan_.granted, layer_totals_, plan_.audit);
      for (index_t l = 0; l < shape_.layers; ++l) {
        std::int64_t held = 0, filled = 0;
        for (const index_t t : layer_tokens(l)) {
          held += t;
          filled += t > 0;
        }
        std::int64_t& total = layer_totals_[static_cast<std::size_t>(l)];
        total = std::min(total, held);
        if (total < filled) fail_argument("ada: layer ", l, ": a total of ", total, " rows is less than one per head");
        first_.push_back(first_.back() + total);
      }
      totals_ = cuda::uploaded(exec, std::span<const std::int64_t>(layer_totals_));
    } else {
      allocator_.allocate(shape_, tokens_, plan_.granted,
                          {rows.data(), shape_.layers, shape_.kv_heads, shape_.kv_heads}, plan_.audit);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < 0 || rows[i] > tokens_[i])
          fail_argument(plan_.specification, ": layer ", i / heads, ", head ", i % heads, " was allocated ", rows[i],
                        " of ", tokens_[i], " rows");
        if (i % heads == 0) first_.push_back(first_.back());
        first_.back() += rows[i];
      }
    }
    budgets_ = cuda::uploaded(exec, std::span<const index_t>(rows));
  }

  void split_layer(const cuda_exec& exec, cuda::ScoredRows rows, index_t l, index_t* budgets) {
    const bool raw = allocator_.normalize == Normalize::none ||
                     (allocator_.normalize == Normalize::automatic && heads_comparable(scorer_));
    if (!raw) {
      float* normalised = score_memory(exec, normalised_, rows.longest);
      cuda::log_softmax(exec, rows.scores, rows.row_stride, rows.tokens, rows.rows, normalised);
      rows.scores = normalised;
    }
    const std::int64_t total = layer_totals_[static_cast<std::size_t>(l)];
    cuda::AdaRule rule{std::llround(allocator_.floor * 1e6), 0};
    if (allocator_.variant == AdaVariant::kvpress)
      rule.reserve = std::max<std::int64_t>(
          1, static_cast<std::int64_t>(allocator_.floor * static_cast<double>(total / shape_.kv_heads)));
    cuda::ada_budgets(exec, rows, shape_.kv_heads, totals_.data() + l, scorer_.protection(), rule, budgets,
                      error_.word());
  }

  // [kv_heads][width] floats, kept from layer to layer.
  float* score_memory(const cuda_exec& exec, cuda::DeviceArray<float>& memory, index_t width) {
    const std::int64_t count = std::int64_t{shape_.kv_heads} * width;
    if (memory.size() < count) memory = cuda::DeviceArray<float>(exec, count);
    return memory.data();
  }

  template <class T>
  void check_layer(const LayerObservation<T>& o) const {
    if (o.layer != done_) fail_argument("planner: layer ", o.layer, " given where layer ", done_, " is next");
    if (!(o.shape == shape_) || std::ssize(o.keys) != shape_.kv_heads)
      fail_argument("planner: the observation of layer ", o.layer, " has another shape than the planner");
    for (index_t h = 0; h < shape_.kv_heads; ++h)
      if (o.tokens(h) != tokens_[static_cast<std::size_t>(shape_.at(o.layer, h))])
        fail_argument("planner: layer ", o.layer, ", head ", h, " holds ", o.tokens(h), " tokens, but ",
                      tokens_[static_cast<std::size_t>(shape_.at(o.layer, h))], " were announced to make_planner()");
  }

  // What the selector protects in a head: what the scorer asks for, or what Ada-KV set aside.
  Protect head_protection(index_t l, index_t head) const {
    const Protect asked = scorer_.protection();
    if constexpr (cuda::IsAda<A>::value)
      return protection_in_head(allocator_, LayerScores{l, {}, layer_tokens(l), asked, heads_comparable(scorer_)},
                                layer_totals_[static_cast<std::size_t>(l)], head);
    else return asked;
  }

  // The same sentence as the host planner's.
  void note_protection() {
    const Protect protect = scorer_.protection();
    std::int64_t cut = 0;
    index_t least_kept = 0, least_asked = 0;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      const auto rows = static_cast<index_t>(plan_.offsets[i + 1] - plan_.offsets[i]);
      const auto at = static_cast<index_t>(i);
      const index_t asked = protect_asked(protect, tokens_[i]).count();
      const index_t kept =
          protect_within(head_protection(at / shape_.kv_heads, at % shape_.kv_heads), tokens_[i], rows).count();
      if (rows >= tokens_[i] || kept == asked) continue;
      if (cut++ == 0 || kept < least_kept) {
        least_kept = kept;
        least_asked = asked;
      }
    }
    if (cut > 0)
      plan_.audit.add("protection cut in ", cut, " of ", tokens_.size(), " heads: ", least_kept, " of the ",
                      least_asked, " protected rows stay where it was cut most (protect=", word_of(protect.share), ')');
  }

  const A& allocator_;
  const S& scorer_;
  CacheShape shape_;
  std::vector<index_t> tokens_;             // [layers * kv_heads]
  std::vector<std::int64_t> layer_totals_;  // [layers], Ada-KV
  std::vector<std::int64_t> first_;         // [layers + 1]: where a layer's indices begin
  index_t done_ = 0;
  EvictionPlan plan_;
  cuda::ErrorFlag error_;
  cuda::DeviceArray<index_t> device_tokens_, budgets_, indices_;
  cuda::DeviceArray<std::int64_t> totals_, offsets_;
  cuda::DeviceArray<float> scores_, normalised_;
};

// What Policy::make_planner(exec, ...) and Policy::plan(exec, ...) call for execution objects other than the host's.
template <Allocator A, class S, Selector K>
CudaPlanner<A, S> make_planner_on(const cuda_exec& exec, const Policy<A, S, K>& policy, const CacheShape& shape,
                                  std::span<const index_t> tokens, const Budget& budget, std::int64_t row_bytes = 0) {
  static_assert(std::same_as<K, TopK>, "the device selects with TopK");
  return {exec, policy.allocator, policy.scorer, policy.specification(), shape, tokens, budget, row_bytes};
}

// The whole plan for a device cache, from one observation per layer. Waits at the end.
template <Allocator A, class S, Selector K, KVCacheView C>
requires(!C::memory_space::host) EvictionPlan
    plan_on(const cuda_exec& exec, const Policy<A, S, K>& policy, const C& view,
            std::span<const LayerObservation<typename C::element_type>> observations, const Budget& budget) {
  detail::check_observations(observations.size(), view.shape());
  const auto [tokens, row_bytes] = detail::rows_to_plan(view);
  auto planner = make_planner_on(exec, policy, view.shape(), tokens, budget, row_bytes);
  for (const auto& o : observations) planner.layer(exec, o);
  return planner.finish(exec);
}

}  // namespace kvevict::inline KVEVICT_ABI
