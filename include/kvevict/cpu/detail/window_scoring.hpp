// The SnapKV scorer over the kernel of window_head.hpp: what each head's work is, how sums of query heads become scores
// of a KV head, and which columns get no score.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/window_head.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/group.hpp"
#include "kvevict/score/pooling.hpp"
#include "kvevict/score/snapkv.hpp"
#include "kvevict/select/nan_score.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

class WindowScoring {
 public:
  explicit WindowScoring(const score::SnapKV& scorer) noexcept : scorer_(scorer) {}

  // Bytes of working memory for a head.
  std::size_t head_scratch(const CacheShape& shape, index_t tokens, bool with_lse) const noexcept {
    const WindowSize s = size_of(shape, tokens, with_lse);
    return own_bytes(s) + kernel_bytes(s);
  }

  // memory: head_scratch() bytes, aligned as an Arena is. out: as in score_on().
  template <class T>
  void score_head(const LayerObservation<T>& o, index_t head, Matrix<float> out, std::span<std::byte> memory) const {
    const index_t tokens = o.tokens(head);
    const WindowSize size = size_of(o.shape, tokens, !o.extras.lse.empty());
    if (size.past == 0) return;
    const std::size_t own = own_bytes(size);
    std::span<float> floats{reinterpret_cast<float*>(memory.data()), own / sizeof(float)};
    const std::span<float> pooling = floats.first(pool_scratch(scorer_.pool, static_cast<std::size_t>(size.past)));
    const Matrix<float> rows_out = rows_of(out, o.shape, head, size.past);
    Matrix<float> sums = rows_out;
    if (!one_sum() && scorer_.group != GroupReduction::none)
      sums = {floats.data() + pooling.size(), size.group, size.past, size.past};

    WindowInput<T> task;
    task.size = size;
    task.keys = o.keys[static_cast<std::size_t>(head)];
    task.queries =
        o.window_queries.subspan(static_cast<std::size_t>(head * size.group), static_cast<std::size_t>(size.group));
    if (!o.positions.empty()) task.key_positions = o.positions[static_cast<std::size_t>(head)];
    task.query_positions = o.window_positions;
    if (!o.extras.lse.empty())
      task.lse = o.extras.lse.subspan(static_cast<std::size_t>(head * size.group) * o.window_positions.size(),
                                      static_cast<std::size_t>(size.group) * o.window_positions.size());
    task.softmax_scale = o.softmax_scale;
    task.weight = scorer_.rows == RowReduction::mean ? 1.f / static_cast<float>(size.rows) : 1.f;
    if (sums.rows == 1 && scorer_.group == GroupReduction::mean) task.weight /= static_cast<float>(size.group);
    WindowHead<T>(task, memory.subspan(own)).run(sums);
    check_sums(o, head, sums, task.weight);

    if (sums.rows > 1 && scorer_.order == PoolOrder::group_then_pool) reduce_group(scorer_.group, sums);
    const index_t pooled =
        scorer_.group == GroupReduction::none || scorer_.order == PoolOrder::pool_then_group ? sums.rows : 1;
    for (index_t r = 0; r < pooled; ++r)
      pool_row(scorer_.pool, {sums.row(r), static_cast<std::size_t>(size.past)}, pooling);
    if (sums.rows > 1 && scorer_.order == PoolOrder::pool_then_group) reduce_group(scorer_.group, sums);
    if (sums.data != rows_out.data) std::copy_n(sums.data, static_cast<std::size_t>(size.past), rows_out.data);
  }

  // Columns that get no score of their own.
  template <class T>
  void fill_unscored(const LayerObservation<T>& o, Matrix<float> out) const {
    float value = -std::numeric_limits<float>::infinity();
    if (scorer_.protect == ProtectShare::score) {
      float largest = 0.f;  // of a layer without scored tokens
      for (index_t h = 0; h < o.shape.kv_heads; ++h) {
        const Matrix<float> rows_here = rows_of(out, o.shape, h, past(o.tokens(h)));
        for (index_t r = 0; r < rows_here.rows; ++r)
          for (index_t j = 0; j < rows_here.cols; ++j) largest = std::max(largest, rows_here.at(r, j));
      }
      value = largest + 1.f;
    }
    for (index_t h = 0; h < o.shape.kv_heads; ++h) {
      const index_t tokens = o.tokens(h);
      const Matrix<float> rows_here = rows_of(out, o.shape, h, tokens);
      for (index_t r = 0; r < rows_here.rows; ++r) {
        std::fill(rows_here.row(r) + past(tokens), rows_here.row(r) + tokens, value);
        if (scorer_.protect == ProtectShare::score)
          std::fill_n(rows_here.row(r), std::min(scorer_.sinks, tokens), value);
      }
    }
  }

 private:
  // Sums of query heads are taken while scores are added up: one row of sums per KV head instead of one per query head.
  bool one_sum() const noexcept {
    return is_linear(scorer_.group) && (scorer_.pool.linear() || scorer_.order == PoolOrder::group_then_pool);
  }
  index_t past(index_t tokens) const noexcept {
    return tokens == 0 ? 0 : tokens - window_rows_used(scorer_.window, tokens);
  }

  WindowSize size_of(const CacheShape& shape, index_t tokens, bool with_lse) const noexcept {
    WindowSize s;
    s.dim = shape.head_dim_k;
    s.rows = tokens == 0 ? 0 : window_rows_used(scorer_.window, tokens);
    s.group = shape.group();
    s.tokens = tokens;
    s.past = past(tokens);
    s.one_sum = one_sum();
    s.lse = with_lse;
    s.store = !with_lse;
    if (scorer_.scratch_limit > 0 && own_bytes(s) + kernel_bytes(s) > static_cast<std::size_t>(scorer_.scratch_limit))
      s.store = false;
    return s;
  }
  static std::size_t kernel_bytes(const WindowSize& s) noexcept {
    return WindowHead<float>::scratch_bytes(s);  // the same for every element type
  }
  // Bytes besides those of the kernel: sums of query heads before they are reduced, and the pooling's chunk.
  std::size_t own_bytes(const WindowSize& s) const noexcept {
    const auto past_tokens = static_cast<std::size_t>(s.past);
    std::size_t floats = pool_scratch(scorer_.pool, past_tokens);
    if (!one_sum() && scorer_.group != GroupReduction::none) floats += static_cast<std::size_t>(s.group) * past_tokens;
    return (floats * sizeof(float) + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
  }
  // Rows of `out` that belong to a KV head: its own, or those of its query heads.
  Matrix<float> rows_of(Matrix<float> out, const CacheShape& shape, index_t head, index_t cols) const noexcept {
    const index_t each = scorer_.group == GroupReduction::none ? shape.group() : 1;
    return {out.row(head * each), each, cols, out.row_stride};
  }

  // No NaN, and no more mass than the rows can give: a larger one means that the log-sum-exp is not that of these rows.
  template <class T>
  void check_sums(const LayerObservation<T>& o, index_t head, Matrix<float> sums, float weight) const {
    const index_t used = window_rows_used(scorer_.window, o.tokens(head));
    const auto rows_added = static_cast<float>(used) * static_cast<float>(sums.rows == 1 ? o.shape.group() : 1);
    const float most = 1.05f * rows_added * weight;
    for (index_t r = 0; r < sums.rows; ++r) {
      const float* const s = sums.row(r);
      int bad = 0;
      for (index_t j = 0; j < sums.cols; ++j) bad |= static_cast<int>(!(s[j] <= most));
      if (bad == 0) continue;
      const index_t j = static_cast<index_t>(std::find_if(s, s + sums.cols, [&](float x) { return !(x <= most); }) - s);
      if (std::isnan(s[j]))
        throw NanScore(head, j,
                       joined_text(score::SnapKV::name, ": layer ", o.layer, ", head ", head, ", token ", j,
                                   ": the score is NaN; keys, queries and log-sum-exp must be numbers"));
      fail_argument(score::SnapKV::name, ": layer ", o.layer, ", head ", head, ", token ", j, ": attention mass ", s[j],
                    " of at most ", rows_added * weight, "; the log-sum-exp (lse) does not belong to these queries");
    }
  }

  const score::SnapKV& scorer_;
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
