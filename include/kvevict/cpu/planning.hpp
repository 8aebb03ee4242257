// What a planner asks of the host: memory for scores, rows of heads that share by score, selections. Its sibling is
// cuda/planning.cuh.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/allocate/detail/row_tables.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/cpu/split_rows.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/select/nan_score.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

class HostPlanning {
 public:
  static constexpr bool host_forms = true;  // global allocators, and rules that change counted rows
  template <class K>
  static constexpr bool selects = HostSelector<K>;

  // keep_scores: of all layers, for finish(); else each layer's go with the next.
  void prepare(const host_exec&, const RowTables& t, bool keep_scores) {
    kept_ = keep_scores;
    if (kept_) width_ = t.tokens.empty() ? 0 : *std::max_element(t.tokens.begin(), t.tokens.end());
  }

  // [kv_heads][longest of the layer], not initialised.
  Matrix<float> score_memory(const host_exec&, const RowTables& t, index_t layer) {
    const index_t heads = t.shape.kv_heads, cols = t.longest(layer), width = kept_ ? width_ : cols;
    const std::int64_t first = kept_ ? t.shape.at(layer, 0) * width : 0;
    scores_.resize(static_cast<std::size_t>(first + std::int64_t{heads} * width));
    return {scores_.data() + first, heads, cols, width};
  }

  // Rows of the heads of a layer that share them.
  void split(const host_exec& exec, RowTables& t, index_t layer, Matrix<const float> scores) {
    const auto rows = layer_of(t.rows, t.shape, layer);
    split_rows(exec, scores, t.heads(layer), t.splits[static_cast<std::size_t>(layer)], rows);
  }

  // Appends what a layer keeps to the plan. Throws NanScore naming the first head.
  template <HostSelector K>
  LayerPlan select(const host_exec& exec, const RowTables& t, index_t layer, Matrix<const float> scores,
                   const K& selector, EvictionPlan& plan) {
    const auto tokens = layer_of(t.tokens, t.shape, layer);
    const auto rows = layer_of(t.rows, t.shape, layer);
    const auto protections = layer_of(t.protections, t.shape, layer);
    std::vector<std::int64_t> ends(1, plan.offsets.back());
    for (const index_t r : rows) ends.push_back(ends.back() + r);
    plan.indices.resize(static_cast<std::size_t>(ends.back()));
    std::vector<index_t> kept(rows.begin(), rows.end());
    const auto scratch_bytes = select_scratch_bytes(selector, t.longest(layer));
    parallel_for(exec, t.shape.kv_heads, scratch_bytes, [&](std::int64_t head, std::span<std::byte> scratch) {
      const auto h = static_cast<std::size_t>(head);
      const auto out = slice(plan.indices, ends[h], rows[h]);
      if (fills_budget<K>() && rows[h] == tokens[h]) {  // the identity needs no scores, and there may be none
        for (std::size_t r = 0; r < out.size(); ++r) out[r] = static_cast<index_t>(r);
        return;
      }
      const std::span row(scores.row(static_cast<index_t>(head)), static_cast<std::size_t>(tokens[h]));
      kept[h] = ranking_row(static_cast<index_t>(head),
                            [&] { return select_row(selector, row, rows[h], protections[h], out, scratch); });
    });
    // Where a selector kept fewer rows than it was given, the others move up.
    std::int64_t to = ends.front();
    for (std::size_t h = 0; h < kept.size(); ++h) {
      if (to != ends[h]) {
        const auto from = plan.indices.begin() + ends[h];
        std::move(from, from + kept[h], plan.indices.begin() + to);
      }
      plan.offsets.push_back(to += kept[h]);
    }
    plan.indices.resize(static_cast<std::size_t>(to));
    return std::as_const(plan).layer(layer);
  }

  // Takes finished scores of a layer into the memory that score_memory() gives.
  void keep(const host_exec& exec, const RowTables& t, index_t layer, Matrix<const float> scores) {
    const Matrix<float> to = score_memory(exec, t, layer);
    for (index_t h = 0; h < to.rows; ++h) std::copy_n(scores.row(h), to.cols, to.row(h));
  }

  // Throws NanScore for the first score among those that `split`, over the heads of all layers, ranks in this one.
  void check_ranked(const RowTables& t, index_t layer, const ScoreSplit& split) const {
    for (index_t h = 0; h < t.shape.kv_heads; ++h) {
      const auto i = static_cast<std::size_t>(t.shape.at(layer, h));
      const index_t first = t.asked[i].before, end = first + t.evictable[i];
      const float* row = kept_scores(t, layer).row(h);
      for (index_t r = first + split.shares[i].aside.sinks; r < end - split.shares[i].aside.newest; ++r)
        if (is_nan_score(row[r])) throw NanScore(h, r);
    }
  }

  // Rows of all heads that share them: global allocators. The scores are those that were kept.
  void split_all(const host_exec& exec, RowTables& t, const ScoreSplit& split) {
    const auto heads = static_cast<index_t>(t.shape.heads_total());
    split_rows(exec, {scores_.data(), heads, width_, width_}, t.all_heads(), split, t.rows);
  }
  Matrix<const float> kept_scores(const RowTables& t, index_t layer) const {
    return {scores_.data() + t.shape.at(layer, 0) * width_, t.shape.kv_heads, t.longest(layer), width_};
  }

  // Nothing runs behind the caller's back, and the plan is complete.
  void check(const host_exec&, std::string_view, const CacheShape&) const noexcept {}
  void collect(const host_exec&, RowTables&, EvictionPlan&) const noexcept {}

  // Why a score of this head may be NaN: its first key or value row with an element that is no finite number, or "".
  template <class T>
  static std::string cause_of_nan(const LayerObservation<T>& o, index_t head) {
    const auto first_bad = [&](std::span<const Rows<const T>> rows, std::string_view what) -> std::string {
      if (rows.size() <= static_cast<std::size_t>(head)) return {};
      const Rows<const T>& of_head = rows[static_cast<std::size_t>(head)];
      for (std::int64_t r = 0; r < of_head.rows; ++r)
        for (index_t c = 0; c < of_head.cols; ++c)
          if (!is_finite_score(to_float(of_head.at(r, c))))
            return joined_text("; the ", what, " of token ", r, " holds a value that is not finite");
      return {};
    };
    const std::string key = first_bad(o.keys, "key");
    return key.empty() ? first_bad(o.values, "value") : key;
  }

 private:
  std::vector<float> scores_;
  bool kept_ = false;
  index_t width_ = 0;  // of kept scores: the longest head of all layers
};

}  // namespace detail

// Found by the planner from the execution object.
inline detail::HostPlanning planning_on(const host_exec&) { return {}; }

}  // namespace kvevict::inline KVEVICT_ABI
