// Attention whose context keys carry a soft mask, forward and backward: how LKV's mask reaches the loss
// (arXiv 2605.06676). For a query with scores s_j = scale q.k_j over context and local keys,
//
//   P_j = e^{s_j} m_j / sum_i e^{s_i} m_i,      o = sum_j P_j v_j,      m = 1 on local keys
//
// the same value as adding log m_j to the scores, but without its 1 / m_j in the gradient. With G = dL/do:
//
//   dL/dm_j = e^{s_j} / Z (G.v_j - G.o),   dL/ds_j = P_j (G.v_j - G.o),   dL/dv_j = P_j G,   Z = sum_i e^{s_i} m_i
//
// One call serves one (layer, head): the rows of its whole group of query heads, and of several independent pieces
// of text (probes of one context) in one packed block, each row naming the local keys that it may see. Context keys and
// values are shared by all rows. Needs Eigen.
#pragma once
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/interop/eigen.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Local keys [begin, end) that a query row sees.
struct VisibleRange {
  index_t begin = 0, end = 0;
};

// What one (layer, head) attends with. A context row is seen by every query row unless `context_seen` says how many of
// the first context rows each query row sees (context queries that look at the rows before them: "dense" training,
// where the own row, which is never masked, is given as a local key).
template <std::floating_point T>
struct MaskedAttention {
  Matrix<const T> queries;                       // [rows][head_dim_k]; query heads of the group one after the other
  Matrix<const T> context_keys, context_values;  // [tokens][head_dim_k | head_dim_v]
  std::span<const T> mask;                       // [tokens], in [0, 1]; empty: all ones
  Matrix<const T> local_keys, local_values;      // [locals][head_dim_k | head_dim_v], never masked
  std::span<const VisibleRange> visible;         // [rows]; empty: no local keys
  std::span<const index_t> context_seen;         // [rows], or empty: all
  T scale = 1;
};

// Gradients that masked_attention_backward adds to. A null pointer or an empty span is not computed.
template <std::floating_point T>
struct MaskedAttentionGradients {
  Matrix<T> queries;                       // [rows][head_dim_k]
  Matrix<T> local_keys, local_values;      // [locals][head_dim_k | head_dim_v]
  std::span<T> mask;                       // [tokens], summed over all rows
  Matrix<T> context_keys, context_values;  // [tokens][head_dim_k | head_dim_v]; only where context rows are trained
};

// What the forward pass leaves for the backward pass. Reuse one object: its memory grows to the largest call and stays.
template <std::floating_point T>
class MaskedAttentionState {
 public:
  // Exponentials of the context scores relative to the row's largest live score, [rows][tokens].
  Matrix<T> exponentials(index_t rows, index_t tokens) { return matrix(exponentials_, rows, tokens); }
  Matrix<T> local(index_t rows, index_t locals) { return matrix(local_, rows, locals); }
  Matrix<T> scratch(index_t rows, index_t tokens) { return matrix(scratch_, rows, tokens); }
  // Sum of masked exponentials of a row; 0 where nothing is alive.
  std::span<T> normaliser(index_t rows) {
    if (normaliser_.size() < static_cast<std::size_t>(rows)) normaliser_.resize(static_cast<std::size_t>(rows));
    return std::span(normaliser_).first(static_cast<std::size_t>(rows));
  }

 private:
  // Aligned: where vector instructions begin in a row decides the last bits, and must not depend on the allocator.
  using Memory = std::vector<T, Eigen::aligned_allocator<T>>;
  static Matrix<T> matrix(Memory& memory, index_t rows, index_t cols) {
    const std::size_t size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
    if (memory.size() < size) memory.resize(size);
    return {memory.data(), rows, cols, cols};
  }
  Memory exponentials_, local_, scratch_, normaliser_;
};

namespace detail {

// Below this a normaliser is taken as this value: a row whose live keys carry next to nothing stays finite.
template <class T>
inline constexpr T least_normaliser = T(1e-30);

// Exponents of masked-out entries, which may lie far above every live score, stop here so that 0 * e^s stays 0.
template <class T>
inline const T largest_exponent = T(0.7) * std::log(std::numeric_limits<T>::max());

template <std::floating_point T>
void check_attention(const MaskedAttention<T>& a) {
  const auto rows = static_cast<std::size_t>(a.queries.rows);
  const auto tokens = static_cast<std::size_t>(a.context_keys.rows);
  if (a.context_values.rows != a.context_keys.rows || a.local_values.rows != a.local_keys.rows ||
      (a.context_keys.rows > 0 && a.context_keys.cols != a.queries.cols) ||
      (a.local_keys.rows > 0 && a.local_keys.cols != a.queries.cols))
    fail_argument("masked_attention: queries of ", a.queries.cols, " values, context keys [", a.context_keys.rows, "][",
                  a.context_keys.cols, "] with ", a.context_values.rows, " values, local keys [", a.local_keys.rows,
                  "][", a.local_keys.cols, "] with ", a.local_values.rows, " values do not fit together");
  if (!a.mask.empty() && a.mask.size() != tokens)
    fail_argument("masked_attention: a mask of ", a.mask.size(), " for ", tokens, " context rows");
  if ((!a.visible.empty() && a.visible.size() != rows) || (!a.context_seen.empty() && a.context_seen.size() != rows))
    fail_argument("masked_attention: visible [", a.visible.size(), "] and context_seen [", a.context_seen.size(),
                  "] must be empty or have one entry for each of ", rows, " query rows");
  for (const VisibleRange v : a.visible)
    if (v.begin < 0 || v.end < v.begin || v.end > a.local_keys.rows)
      fail_argument("masked_attention: local keys [", v.begin, ", ", v.end, ") of ", a.local_keys.rows);
  for (const index_t seen : a.context_seen)
    if (seen < 0 || seen > a.context_keys.rows)
      fail_argument("masked_attention: ", seen, " context rows seen of ", a.context_keys.rows);
}

template <std::floating_point T>
VisibleRange local_range(const MaskedAttention<T>& a, index_t row) {
  return a.visible.empty() ? VisibleRange{} : a.visible[static_cast<std::size_t>(row)];
}
template <std::floating_point T>
index_t context_range(const MaskedAttention<T>& a, index_t row) {
  return a.context_seen.empty() ? a.context_keys.rows : a.context_seen[static_cast<std::size_t>(row)];
}

}  // namespace detail

// out: [rows][head_dim_v], written. A row without any live key (every context row it sees has mask 0, no local key)
// gives 0. O(rows * tokens * (head_dim_k + head_dim_v)).
template <std::floating_point T>
void masked_attention(const MaskedAttention<T>& a, Matrix<T> out, MaskedAttentionState<T>& state) {
  using namespace detail;
  check_attention(a);
  const index_t rows = a.queries.rows, tokens = a.context_keys.rows, locals = a.local_keys.rows;
  auto e = as_eigen(state.exponentials(rows, tokens));
  auto weights = as_eigen(state.scratch(rows, tokens));
  auto local = as_eigen(state.local(rows, locals));
  const std::span<T> normaliser = state.normaliser(rows);
  const auto queries = as_eigen(a.queries);
  auto result = as_eigen(out);
  if (tokens > 0) e.noalias() = queries * as_eigen(a.context_keys).transpose();
  for (index_t r = 0; r < rows; ++r) {
    const index_t seen = context_range(a, r);
    const VisibleRange v = local_range(a, r);
    auto row_e = e.row(r).head(seen);
    auto row_l = local.row(r).segment(v.begin, v.end - v.begin);
    row_e *= a.scale;
    if (row_l.size() > 0) {
      row_l.noalias() = queries.row(r) * as_eigen(a.local_keys).middleRows(v.begin, v.end - v.begin).transpose();
      row_l *= a.scale;
    }
    T largest = -std::numeric_limits<T>::infinity();
    if (a.mask.empty()) {
      if (seen > 0) largest = row_e.maxCoeff();
    } else {
      for (index_t j = 0; j < seen; ++j)
        if (a.mask[static_cast<std::size_t>(j)] > 0) largest = std::max(largest, row_e[j]);
    }
    if (row_l.size() > 0) largest = std::max(largest, row_l.maxCoeff());
    T& sum = normaliser[static_cast<std::size_t>(r)];
    weights.row(r).tail(tokens - seen).setZero();
    e.row(r).tail(tokens - seen).setZero();
    if (largest == -std::numeric_limits<T>::infinity()) {  // nothing alive
      sum = 0;
      row_e.setZero();
      row_l.setZero();
      weights.row(r).setZero();
      continue;
    }
    row_e = (row_e.array() - largest).min(largest_exponent<T>).exp().matrix();
    row_l = (row_l.array() - largest).exp().matrix();
    if (a.mask.empty()) {
      weights.row(r).head(seen) = row_e;
    } else {
      const Eigen::Map<const Eigen::Array<T, 1, Eigen::Dynamic>> mask(a.mask.data(), tokens);
      weights.row(r).head(seen) = (row_e.array() * mask.head(seen)).matrix();
    }
    sum = std::max(weights.row(r).head(seen).sum() + row_l.sum(), least_normaliser<T>);
  }
  if (tokens > 0) result.noalias() = weights * as_eigen(a.context_values);
  else result.setZero();
  for (index_t r = 0; r < rows; ++r) {
    const VisibleRange v = local_range(a, r);
    const T sum = normaliser[static_cast<std::size_t>(r)];
    if (sum == 0) continue;
    if (v.end > v.begin)
      result.row(r).noalias() += local.row(r).segment(v.begin, v.end - v.begin) *
                                 as_eigen(a.local_values).middleRows(v.begin, v.end - v.begin);
    result.row(r) /= sum;
  }
}

// Adds to `grads`. out and state: of the forward call with the same `a`; grad_out: dL/dout [rows][head_dim_v].
template <std::floating_point T>
void masked_attention_backward(const MaskedAttention<T>& a, Matrix<const T> out, Matrix<const T> grad_out,
                               MaskedAttentionState<T>& state, const MaskedAttentionGradients<T>& grads) {
  using namespace detail;
  const index_t rows = a.queries.rows, tokens = a.context_keys.rows, locals = a.local_keys.rows;
  const auto e = as_eigen(state.exponentials(rows, tokens));
  auto slope = as_eigen(state.scratch(rows, tokens));  // G.v_j, then dL/ds_j
  const auto local = as_eigen(state.local(rows, locals));
  const std::span<const T> normaliser = state.normaliser(rows);
  const auto g = as_eigen(grad_out), o = as_eigen(out), queries = as_eigen(a.queries);
  using Row = Eigen::Array<T, 1, Eigen::Dynamic>;
  const Eigen::Map<const Row> mask(a.mask.data(), a.mask.empty() ? 0 : tokens);
  if (tokens > 0) slope.noalias() = g * as_eigen(a.context_values).transpose();
  for (index_t r = 0; r < rows; ++r) {
    const T sum = normaliser[static_cast<std::size_t>(r)];
    if (sum == 0) {
      slope.row(r).setZero();
      continue;
    }
    const T inverse = 1 / sum;
    // A floored normaliser is a constant: its output is linear in the mask.
    const T mean = sum > least_normaliser<T> ? g.row(r).dot(o.row(r)) : T(0);
    auto row = slope.row(r).array();
    row = e.row(r).array() * (row - mean) * inverse;
    if (!grads.mask.empty()) Eigen::Map<Row>(grads.mask.data(), tokens) += row;
    if (!a.mask.empty()) row *= mask;
    const VisibleRange v = local_range(a, r);
    for (index_t j = v.begin; j < v.end; ++j) {
      const T p = local(r, j) * inverse;
      const T d = p * (g.row(r).dot(as_eigen(a.local_values).row(j)) - mean) * a.scale;
      if (grads.queries.data) as_eigen(grads.queries).row(r) += d * as_eigen(a.local_keys).row(j);
      if (grads.local_keys.data) as_eigen(grads.local_keys).row(j) += d * queries.row(r);
      if (grads.local_values.data) as_eigen(grads.local_values).row(j) += p * g.row(r);
    }
  }
  if (tokens == 0) return;
  if (grads.queries.data || grads.context_keys.data) slope *= a.scale;
  if (grads.queries.data) as_eigen(grads.queries).noalias() += slope * as_eigen(a.context_keys);
  if (grads.context_keys.data) as_eigen(grads.context_keys).noalias() += slope.transpose() * queries;
  if (grads.context_values.data) {
    for (index_t r = 0; r < rows; ++r) {
      const T sum = normaliser[static_cast<std::size_t>(r)];
      auto row = slope.row(r).array();
      if (sum == 0) row.setZero();
      else row = e.row(r).array() / sum;
      if (!a.mask.empty()) row *= mask;
    }
    as_eigen(grads.context_values).noalias() += slope.transpose() * g;
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
