// Planning layer by layer: scores of one layer, rows per head, selection. A whole plan is the loop over this.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/audit.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

enum class AllocatorKind { fixed, layer, global };  // static, per layer, over all layers

// The kind is a property of the type, or of the value where the type is erased.
template <Allocator A>
AllocatorKind kind_of(const A& allocator) {
  if constexpr (requires { allocator.kind(); }) return allocator.kind();
  else if constexpr (GlobalAllocator<A>) return AllocatorKind::global;
  else if constexpr (LayerAllocator<A>) return AllocatorKind::layer;
  else return AllocatorKind::fixed;
}

namespace detail {

// What every planner asks of its input. Throws std::invalid_argument.
template <class S>
void check_planning(const S& scorer, std::string_view specification, const CacheShape& shape,
                    std::span<const index_t> tokens, const Budget& budget, std::int64_t row_bytes) {
  check_shape(shape);
  if (std::ssize(tokens) != shape.heads_total())
    fail_argument("make_planner: ", tokens.size(), " token counts for ", shape.layers, " layers of ", shape.kv_heads,
                  " heads; one per (layer, head) is required");
  for (const index_t t : tokens)
    if (t < 0) fail_argument("make_planner: a head of ", t, " tokens; 0 or more is required");
  if (budget.unit() == Budget::Unit::bytes && row_bytes < 1)
    fail_argument("make_planner: a budget in bytes needs row_bytes, the bytes of a key and a value row; got ",
                  row_bytes);
  if (const index_t rows = score_heads(scorer, shape); rows != shape.kv_heads)
    fail_argument(specification, ": scores are per query head (", rows, " rows), but a plan is per KV head (",
                  shape.kv_heads, "); choose a group reduction (mean, max or sum)");
}

// Token counts of a cache, [layers * kv_heads], and the bytes of one key and one value row.
template <KVCacheView C>
std::pair<std::vector<index_t>, std::int64_t> rows_to_plan(const C& view) {
  const CacheShape shape = view.shape();
  std::vector<index_t> tokens;
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) tokens.push_back(view.tokens(l, h));
  return {std::move(tokens),
          (std::int64_t{shape.head_dim_k} + shape.head_dim_v) * std::int64_t{sizeof(typename C::element_type)}};
}

// Throws std::invalid_argument unless there is an observation for each layer.
inline void check_observations(std::size_t observations, const CacheShape& shape) {
  if (static_cast<std::int64_t>(observations) != shape.layers)
    fail_argument("plan: ", observations, " observations for ", shape.layers, " layers");
}

}  // namespace detail

// Made by Policy::make_planner(). Layers are given in order, each once. With a layer-wise policy, layer() answers with
// what that layer keeps before the next one exists. A global policy can only observe(); its plan is known after
// finish(). Holds references to the policy's parts: the policy must outlive it. Keeps no state between two planners.
template <Allocator A, class S, Selector K>
class LayerPlanner {
 public:
  // tokens: [layers * kv_heads]. row_bytes: bytes of one key and one value row; only a budget in bytes needs it.
  LayerPlanner(const A& allocator, const S& scorer, const K& selector, std::string specification,
               const CacheShape& shape, std::span<const index_t> tokens, const Budget& budget, std::int64_t row_bytes)
      : allocator_(allocator),
        scorer_(scorer),
        selector_(selector),
        kind_(kind_of(allocator)),
        shape_(shape),
        tokens_(tokens.begin(), tokens.end()) {
    detail::check_planning(scorer, specification, shape, tokens, budget, row_bytes);
    plan_.layers = shape.layers;
    plan_.heads = shape.kv_heads;
    plan_.offsets.reserve(tokens_.size() + 1);
    plan_.offsets.push_back(0);
    plan_.specification = std::move(specification);
    plan_.asked = budget.description();
    plan_.granted = budget.resolve(tokens_, row_bytes, allocator.minimum_rows, plan_.audit);
    rows_.resize(tokens_.size());
    if (kind_ == AllocatorKind::fixed) {
      if constexpr (StaticAllocator<A>)
        allocator_.allocate(shape_, tokens_, plan_.granted,
                            {rows_.data(), shape.layers, shape.kv_heads, shape.kv_heads}, plan_.audit);
    } else if (kind_ == AllocatorKind::layer) {
      layer_totals_.resize(static_cast<std::size_t>(shape.layers));
      if constexpr (LayerAllocator<A>)
        allocator_.layer_totals(shape_, tokens_, plan_.granted, layer_totals_, plan_.audit);
    }
  }

  // True where layer() works: the plan of a layer needs that layer alone.
  bool layerwise() const noexcept { return kind_ != AllocatorKind::global; }
  const GrantedBudget& granted() const noexcept { return plan_.granted; }

  // What the observed layer keeps. Throws std::domain_error naming layer, head and token for a NaN score, and
  // std::invalid_argument where the observation is not the next layer, does not fit, lacks an input of the scorer, or
  // the policy is global. The spans are valid until the next call.
  template <class T>
  LayerPlan layer(const host_exec& exec, const LayerObservation<T>& o) {
    if (!layerwise())
      fail_argument(plan_.specification,
                    ": this allocator needs the scores of every layer, so it cannot plan layer by layer; give it all "
                    "layers with observe() and take the plan from finish()");
    check_layer(o);
    const auto rows = layer_rows(o.layer);
    const auto tokens = layer_tokens(o.layer);
    std::vector<float> scores;
    if (needs_scores(o.layer)) scores = score(exec, o);
    const Matrix<const float> matrix = as_matrix(scores, o);
    if constexpr (LayerAllocator<A>)
      if (kind_ == AllocatorKind::layer) {
        if (scores.empty()) std::copy(tokens.begin(), tokens.end(), rows.begin());
        else
          allocator_.allocate_layer(exec, layer_scores(o.layer, matrix),
                                    layer_totals_[static_cast<std::size_t>(o.layer)], rows, plan_.audit);
      }
    select(exec, o.layer, matrix);
    ++next_layer_;
    return plan_.layer(o.layer);
  }

  // Global policies: takes the scores of the next layer. O(kv_heads * tokens) memory stays until finish().
  template <class T>
  void observe(const host_exec& exec, const LayerObservation<T>& o) {
    check_layer(o);
    // The columns of the next layer may differ, so each layer keeps its own matrix.
    widths_.push_back(o.most_tokens());
    scores_.push_back(score(exec, o));
    ++next_layer_;
  }

  // The whole plan, after the last layer. The planner is spent.
  EvictionPlan finish(const host_exec& exec) {
    if (next_layer_ != shape_.layers)
      fail_argument("finish: ", next_layer_, " of ", shape_.layers, " layers were planned");
    if constexpr (GlobalAllocator<A>)
      if (kind_ == AllocatorKind::global) {
        std::vector<LayerScores> layers;
        for (index_t l = 0; l < shape_.layers; ++l) {
          const auto i = static_cast<std::size_t>(l);
          layers.push_back(layer_scores(l, {scores_[i].data(), shape_.kv_heads, widths_[i], widths_[i]}));
        }
        allocator_.allocate_all(exec, layers, plan_.granted,
                                {rows_.data(), shape_.layers, shape_.kv_heads, shape_.kv_heads}, plan_.audit);
        for (const LayerScores& l : layers) select(exec, l.layer, l.scores);
      }
    if (cut_heads_ > 0)
      plan_.audit.add("protection cut in ", cut_heads_, " of ", tokens_.size(), " heads: ", least_kept_, " of the ",
                      least_asked_,
                      " protected rows stay where it was cut most (protect=", word_of(scorer_.protection().share), ')');
    return std::move(plan_);
  }

 private:
  std::span<index_t> layer_rows(index_t l) {
    return std::span(rows_).subspan(static_cast<std::size_t>(shape_.at(l, 0)),
                                    static_cast<std::size_t>(shape_.kv_heads));
  }
  std::span<const index_t> layer_tokens(index_t l) const {
    return std::span(tokens_).subspan(static_cast<std::size_t>(shape_.at(l, 0)),
                                      static_cast<std::size_t>(shape_.kv_heads));
  }
  LayerScores layer_scores(index_t l, Matrix<const float> scores) const {
    return {l, scores, layer_tokens(l), scorer_.protection(), heads_comparable(scorer_)};
  }
  template <class T>
  static Matrix<const float> as_matrix(const std::vector<float>& scores, const LayerObservation<T>& o) {
    return {scores.data(), o.shape.kv_heads, o.most_tokens(), o.most_tokens()};
  }

  // Where every row of the layer stays there is nothing to rank.
  bool needs_scores(index_t l) {
    if constexpr (!fills_budget<K>()) return true;
    const auto tokens = layer_tokens(l);
    if (kind_ == AllocatorKind::layer) {
      std::int64_t all = 0;
      for (const index_t t : tokens) all += t;
      return layer_totals_[static_cast<std::size_t>(l)] < all;
    }
    const auto rows = layer_rows(l);
    for (std::size_t h = 0; h < tokens.size(); ++h)
      if (rows[h] < tokens[h]) return true;
    return false;
  }

  template <class T>
  void check_layer(const LayerObservation<T>& o) const {
    if (o.layer != next_layer_)
      fail_argument("planner: layer ", o.layer, " given where layer ", next_layer_, " is next");
    if (!(o.shape == shape_) || std::ssize(o.keys) != shape_.kv_heads)
      fail_argument("planner: the observation of layer ", o.layer, " has another shape than the planner (",
                    o.shape.kv_heads, " heads against ", shape_.kv_heads, ", head dimension ", o.shape.head_dim_k,
                    " against ", shape_.head_dim_k, ')');
    for (index_t h = 0; h < shape_.kv_heads; ++h)
      if (o.tokens(h) != tokens_[static_cast<std::size_t>(shape_.at(o.layer, h))])
        fail_argument("planner: layer ", o.layer, ", head ", h, " holds ", o.tokens(h), " tokens, but ",
                      tokens_[static_cast<std::size_t>(shape_.at(o.layer, h))], " were announced to make_planner()");
  }

  template <class T>
  std::vector<float> score(const host_exec& exec, const LayerObservation<T>& o) const {
    check_inputs(plan_.specification, needs_of(scorer_), scorer_.window_rows(), o);
    const index_t width = o.most_tokens();
    std::vector<float> scores(static_cast<std::size_t>(shape_.kv_heads) * static_cast<std::size_t>(width));
    score_on(exec, scorer_, o, Matrix<float>{scores.data(), shape_.kv_heads, width, width});
    return scores;
  }

  // Appends the rows of one layer to the plan.
  void select(const host_exec& exec, index_t l, Matrix<const float> scores) {
    const auto tokens = layer_tokens(l);
    const auto rows = layer_rows(l);
    const std::int64_t first = plan_.offsets.back();
    std::int64_t end = first;
    index_t most = 0;
    for (std::size_t h = 0; h < tokens.size(); ++h) {
      if (rows[h] < 0 || rows[h] > tokens[h])
        fail_argument(plan_.specification, ": layer ", l, ", head ", h, " was allocated ", rows[h], " of ", tokens[h],
                      " rows");
      plan_.offsets.push_back(end += rows[h]);
      most = std::max(most, tokens[h]);
      note_protection(l, static_cast<index_t>(h), tokens[h], rows[h]);
    }
    plan_.indices.resize(static_cast<std::size_t>(end));
    std::vector<index_t> kept(rows.begin(), rows.end());
    parallel_for(
        exec, shape_.kv_heads, selector_.scratch_bytes(most), [&](std::int64_t h, std::span<std::byte> scratch) {
          const auto i = static_cast<std::size_t>(h);
          const std::int64_t begin = plan_.offsets[plan_.offsets.size() - 1 - tokens.size() + i];
          const auto out =
              std::span(plan_.indices).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(rows[i]));
          if (fills_budget<K>() && rows[i] == tokens[i]) {  // the identity needs no scores, and there may be none
            for (std::size_t r = 0; r < out.size(); ++r) out[r] = static_cast<index_t>(r);
            return;
          }
          try {
            kept[i] = selector_.select({scores.row(static_cast<index_t>(h)), static_cast<std::size_t>(tokens[i])},
                                       rows[i], head_protection(l, static_cast<index_t>(h)), out, scratch);
          } catch (const NanScore& nan) {
            fail_domain(plan_.specification, ": the score of layer ", l, ", head ", h, ", token ", nan.token,
                        " is NaN");
          }
        });
    if constexpr (!fills_budget<K>()) close_gaps(kept);
  }

  // Where a selector kept fewer rows than it was given. kept: of each head of the layer that was added last.
  void close_gaps(std::span<const index_t> kept) {
    const std::size_t base = plan_.offsets.size() - 1 - kept.size();
    std::int64_t to = plan_.offsets[base], begin = to;
    for (std::size_t h = 0; h < kept.size(); ++h) {
      const auto from = plan_.indices.begin() + begin;
      begin = plan_.offsets[base + h + 1];
      std::move(from, from + kept[h], plan_.indices.begin() + to);
      plan_.offsets[base + h + 1] = to += kept[h];
    }
    plan_.indices.resize(static_cast<std::size_t>(to));
  }

  // What the scorer asks for, or less where the allocator set less aside before it compared scores.
  Protect head_protection(index_t l, index_t head) const {
    if constexpr (LayerAllocator<A>)
      if (kind_ == AllocatorKind::layer)
        return protection_in_head(allocator_, layer_scores(l, {}), layer_totals_[static_cast<std::size_t>(l)], head);
    return scorer_.protection();
  }

  void note_protection(index_t l, index_t head, index_t tokens, index_t rows) {
    if (rows >= tokens) return;
    const index_t asked = protect_asked(scorer_.protection(), tokens).count();
    const index_t kept = protect_within(head_protection(l, head), tokens, rows).count();
    if (kept == asked) return;
    if (cut_heads_++ == 0 || kept < least_kept_) {
      least_kept_ = kept;
      least_asked_ = asked;
    }
  }

  const A& allocator_;
  const S& scorer_;
  const K& selector_;
  AllocatorKind kind_;
  CacheShape shape_;
  std::vector<index_t> tokens_;             // [layers * kv_heads]
  std::vector<index_t> rows_;               // [layers * kv_heads]
  std::vector<std::int64_t> layer_totals_;  // [layers], layer allocators
  std::vector<std::vector<float>> scores_;  // [layers][kv_heads * width], global allocators
  std::vector<index_t> widths_;             // [layers], global allocators
  EvictionPlan plan_;
  index_t next_layer_ = 0;
  std::int64_t cut_heads_ = 0;
  index_t least_kept_ = 0, least_asked_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI
