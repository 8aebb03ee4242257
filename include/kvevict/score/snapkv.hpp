// The observation-window scorer of SnapKV (arXiv 2404.14469) with every variant in use as a parameter: a token scores
// by the attention that the newest `window` prompt queries pay to it.
//
//   A = softmax(q . k * softmax_scale) over all keys that the query row sees by position, in float32
//   s_j = sum or mean over the window rows of A_ij, for the tokens before the window
//   pooling along the tokens and reduction over the query heads of a KV head, in either order
//
// The mass on the window itself is part of the softmax but not of the scores, so scores sum up to less than one per
// row.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/window_head.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/score/group.hpp"
#include "kvevict/score/pooling.hpp"

namespace kvevict::inline KVEVICT_ABI {

enum class RowReduction { sum, mean };  // over the window's query rows
constexpr auto words_of(RowReduction) noexcept { return std::to_array<std::string_view>({"sum", "mean"}); }

enum class PoolOrder { group_then_pool, pool_then_group };
constexpr auto words_of(PoolOrder) noexcept {
  return std::to_array<std::string_view>({"group-then-pool", "pool-then-group"});
}

namespace score {

struct SnapKV {
  static constexpr std::string_view name = "snapkv";
  static constexpr Needs needs = Needs::keys | Needs::window_queries;  // takes extras.lse where it is given
  static constexpr bool heads_comparable = true;                       // attention masses

  index_t window = 32;  // newest queries to look with; a head of t tokens uses min(window, max(1, t / 2))
  RowReduction rows = RowReduction::mean;
  Pooling pool = Pooling::max(7);
  GroupReduction group = GroupReduction::mean;
  PoolOrder order = PoolOrder::group_then_pool;  // of group reduction and pooling
  ProtectShare protect = ProtectShare::half;     // score: window and sinks get the layer's largest score + 1
  index_t sinks = 0;
  // Bytes of working memory per thread; 0: no limit. Where one head's [window * group][tokens] floats do not fit, the
  // products are computed twice instead of being stored, with equal results. What two passes need is taken anyway.
  std::int64_t scratch_limit = 0;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("window", self.window);
    visit("rows", self.rows);
    visit("pool", self.pool);
    visit("group", self.group);
    visit("order", self.order);
    visit("protect", self.protect);
    visit("sinks", self.sinks);
    visit("scratch_limit", self.scratch_limit);
  }

  index_t window_rows() const noexcept { return window; }
  Protect protection() const noexcept { return {sinks, window, protect}; }
  index_t score_heads(const CacheShape& shape) const noexcept {
    return group == GroupReduction::none ? shape.q_heads : shape.kv_heads;
  }

  // Throws std::invalid_argument unless every parameter is legal.
  void check() const {
    if (window < 1) fail_argument(name, ": window=", window, "; at least 1 is required");
    if (sinks < 0) fail_argument(name, ": sinks=", sinks, "; at least 0 is required");
    if (scratch_limit < 0) fail_argument(name, ": scratch_limit=", scratch_limit, "; 0 (no limit) or more is required");
    check_pooling(pool);
  }

  // Working memory of score_on() for heads of at most `tokens` rows, to size an Arena beforehand. with_lse: the
  // observation carries extras.lse.
  std::size_t scratch_bytes(const CacheShape& shape, index_t tokens, int threads = 1, bool with_lse = false) const {
    const auto stride = [](std::size_t bytes) {
      return (bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
    };
    return stride(head_scratch(shape, tokens, with_lse)) *
           static_cast<std::size_t>(std::clamp<index_t>(static_cast<index_t>(threads), 1, shape.kv_heads));
  }

  // out: [score_heads(shape)][most tokens of a head]; with group=none row h belongs to query head h. Window columns get
  // -inf (protect=score: the layer's largest score + 1, and so do the sinks). Heads may differ in length.
  // Throws std::invalid_argument for inputs that are missing or do not fit, std::domain_error for a NaN score.
  // O(q_heads * window * tokens * head_dim_k).
  template <CacheElement T>
  friend void score_on(const host_exec& exec, const SnapKV& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(exec, o, out);
  }

 private:
  template <class T>
  void score_layer(const host_exec& exec, const LayerObservation<T>& o, Matrix<float> out) const {
    check();
    check_inputs(name, needs, window, o);
    check_layout(o, out);
    const bool with_lse = !o.extras.lse.empty();
    std::size_t scratch = 0;
    for (index_t h = 0; h < o.shape.kv_heads; ++h)
      scratch = std::max(scratch, head_scratch(o.shape, o.tokens(h), with_lse));
    parallel_for(exec, o.shape.kv_heads, scratch, [&](std::int64_t h, std::span<std::byte> memory) {
      score_head(o, static_cast<index_t>(h), out, memory);
    });
    fill_unscored(o, out);
  }

  // Sums of query heads are taken while scores are added up: one row of sums per KV head instead of one per query head.
  bool one_sum() const noexcept { return is_linear(group) && (pool.linear() || order == PoolOrder::group_then_pool); }
  index_t past(index_t tokens) const noexcept { return tokens == 0 ? 0 : tokens - window_rows_used(window, tokens); }

  detail::WindowSize size_of(const CacheShape& shape, index_t tokens, bool with_lse) const noexcept {
    detail::WindowSize s;
    s.dim = shape.head_dim_k;
    s.rows = tokens == 0 ? 0 : window_rows_used(window, tokens);
    s.group = shape.group();
    s.tokens = tokens;
    s.past = past(tokens);
    s.one_sum = one_sum();
    s.lse = with_lse;
    s.store = !with_lse;
    if (scratch_limit > 0 && own_bytes(s) + kernel_bytes(s) > static_cast<std::size_t>(scratch_limit)) s.store = false;
    return s;
  }
  static std::size_t kernel_bytes(const detail::WindowSize& s) noexcept {
    return detail::WindowHead<float>::scratch_bytes(s);  // the same for every element type
  }
  // Bytes besides those of the kernel: sums of query heads before they are reduced, and the pooling's chunk.
  std::size_t own_bytes(const detail::WindowSize& s) const noexcept {
    const auto past_tokens = static_cast<std::size_t>(s.past);
    std::size_t floats = pool_scratch(pool, past_tokens);
    if (!one_sum() && group != GroupReduction::none) floats += static_cast<std::size_t>(s.group) * past_tokens;
    return (floats * sizeof(float) + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
  }
  std::size_t head_scratch(const CacheShape& shape, index_t tokens, bool with_lse) const noexcept {
    const detail::WindowSize s = size_of(shape, tokens, with_lse);
    return own_bytes(s) + kernel_bytes(s);
  }

  template <class T>
  void check_layout(const LayerObservation<T>& o, const Matrix<float>& out) const {
    const CacheShape& s = o.shape;
    if (o.keys.size() != static_cast<std::size_t>(s.kv_heads))
      fail_argument(name, ": layer ", o.layer, " has keys of ", o.keys.size(), " heads; the shape says ", s.kv_heads);
    if (o.window_queries.size() != static_cast<std::size_t>(s.q_heads))
      fail_argument(name, ": layer ", o.layer, " has window queries of ", o.window_queries.size(),
                    " query heads; the shape says ", s.q_heads);
    const std::size_t recorded = o.window_positions.size();
    for (const auto& q : o.window_queries)
      if (q.cols != s.head_dim_k || q.rows < static_cast<std::int64_t>(recorded))
        fail_argument(name, ": layer ", o.layer, " has window queries [", q.rows, "][", q.cols, "]; [", recorded, "][",
                      s.head_dim_k, "] is required");
    for (const auto& k : o.keys)
      if (k.cols != s.head_dim_k)
        fail_argument(name, ": layer ", o.layer, " has keys of ", k.cols, " elements; the shape says ", s.head_dim_k);
    if (!o.extras.lse.empty() && o.extras.lse.size() != static_cast<std::size_t>(s.q_heads) * recorded)
      fail_argument(name, ": layer ", o.layer, " has ", o.extras.lse.size(), " log-sum-exp values; ", s.q_heads,
                    " query heads * ", recorded, " window rows are required");
    if (out.rows != score_heads(s) || out.cols < o.most_tokens())
      fail_argument(name, ": scores [", out.rows, "][", out.cols, "] asked of layer ", o.layer, "; [", score_heads(s),
                    "][", o.most_tokens(), "] is required");
  }

  // Rows of `out` that belong to a KV head: its own, or those of its query heads.
  Matrix<float> rows_of(Matrix<float> out, const CacheShape& shape, index_t head, index_t cols) const noexcept {
    const index_t each = group == GroupReduction::none ? shape.group() : 1;
    return {out.row(head * each), each, cols, out.row_stride};
  }

  template <class T>
  void score_head(const LayerObservation<T>& o, index_t head, Matrix<float> out, std::span<std::byte> memory) const {
    const index_t tokens = o.tokens(head);
    const detail::WindowSize size = size_of(o.shape, tokens, !o.extras.lse.empty());
    if (size.past == 0) return;
    const std::size_t own = own_bytes(size);
    std::span<float> floats{reinterpret_cast<float*>(memory.data()), own / sizeof(float)};
    const std::span<float> pooling = floats.first(pool_scratch(pool, static_cast<std::size_t>(size.past)));
    const Matrix<float> rows_out = rows_of(out, o.shape, head, size.past);
    Matrix<float> sums = rows_out;
    if (!one_sum() && group != GroupReduction::none)
      sums = {floats.data() + pooling.size(), size.group, size.past, size.past};

    detail::WindowInput<T> task;
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
    task.weight = rows == RowReduction::mean ? 1.f / static_cast<float>(size.rows) : 1.f;
    if (sums.rows == 1 && group == GroupReduction::mean) task.weight /= static_cast<float>(size.group);
    detail::WindowHead<T>(task, memory.subspan(own)).run(sums);
    check_sums(o, head, sums, task.weight);

    if (sums.rows > 1 && order == PoolOrder::group_then_pool) reduce_group(group, sums);
    const index_t pooled = group == GroupReduction::none || order == PoolOrder::pool_then_group ? sums.rows : 1;
    for (index_t r = 0; r < pooled; ++r) pool_row(pool, {sums.row(r), static_cast<std::size_t>(size.past)}, pooling);
    if (sums.rows > 1 && order == PoolOrder::pool_then_group) reduce_group(group, sums);
    if (sums.data != rows_out.data) std::copy_n(sums.data, static_cast<std::size_t>(size.past), rows_out.data);
  }

  // No NaN, and no more mass than the rows can give: a larger one means that the log-sum-exp is not that of these rows.
  template <class T>
  void check_sums(const LayerObservation<T>& o, index_t head, Matrix<float> sums, float weight) const {
    const index_t used = window_rows_used(window, o.tokens(head));
    const auto rows_added = static_cast<float>(used) * static_cast<float>(sums.rows == 1 ? o.shape.group() : 1);
    const float most = 1.05f * rows_added * weight;
    for (index_t r = 0; r < sums.rows; ++r) {
      const float* const s = sums.row(r);
      int bad = 0;
      for (index_t j = 0; j < sums.cols; ++j) bad |= static_cast<int>(!(s[j] <= most));
      if (bad == 0) continue;
      const index_t j = static_cast<index_t>(std::find_if(s, s + sums.cols, [&](float x) { return !(x <= most); }) - s);
      if (std::isnan(s[j]))
        fail_domain(name, ": layer ", o.layer, ", head ", head, ", token ", j,
                    ": the score is NaN; keys, queries and log-sum-exp must be numbers");
      fail_argument(name, ": layer ", o.layer, ", head ", head, ", token ", j, ": attention mass ", s[j],
                    " of at most ", rows_added * weight, "; the log-sum-exp (lse) does not belong to these queries");
    }
  }

  // Columns that get no score of their own.
  template <class T>
  void fill_unscored(const LayerObservation<T>& o, Matrix<float> out) const {
    float value = -std::numeric_limits<float>::infinity();
    if (protect == ProtectShare::score) {
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
        if (protect == ProtectShare::score) std::fill_n(rows_here.row(r), std::min(sinks, tokens), value);
      }
    }
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
