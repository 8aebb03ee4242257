// Heads share rows by their scores, on the host: all of them are ranked as one list, and each head gets what it has
// among the best, but at least what is set aside and reserved for it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvevict/allocate/score_split.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/topk.hpp"
#include "kvevict/select/nan_score.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// Log of the softmax of each row over its finite entries. ranges: [rows], what there is of each row.
inline void log_softmax(const host_exec& exec, Matrix<const float> scores, std::span<const IndexRange> ranges,
                        Matrix<float> out) {
  parallel_for(exec, scores.rows, [&](std::int64_t r) {
    const float* in = scores.row(static_cast<index_t>(r));
    float* to = out.row(static_cast<index_t>(r));
    const auto [begin, end] = ranges[static_cast<std::size_t>(r)];
    float largest = -std::numeric_limits<float>::infinity();
    for (index_t i = begin; i < end; ++i)
      if (is_finite_score(in[i])) largest = std::max(largest, in[i]);
    double sum = 0;
    for (index_t i = begin; i < end; ++i)
      if (is_finite_score(in[i])) sum += static_cast<double>(std::exp(in[i] - largest));
    const auto log_sum = static_cast<float>(std::log(sum));
    for (index_t i = begin; i < end; ++i) to[i] = log_share(in[i], largest, log_sum);
  });
}

// Each row's candidates times (sum of its best `count`) / (sum of all of them).
inline void weigh_by_best(const host_exec& exec, Matrix<const float> scores, std::span<const IndexRange> candidates,
                          index_t count, Matrix<float> out) {
  parallel_for(exec, scores.rows, topk_scratch_bytes(scores.cols), [&](std::int64_t r, std::span<std::byte> scratch) {
    const IndexRange range = candidates[static_cast<std::size_t>(r)];
    if (range.empty()) return;
    const std::span row(scores.row(static_cast<index_t>(r)) + range.begin, static_cast<std::size_t>(range.size()));
    std::vector<index_t> best(static_cast<std::size_t>(std::min(count, range.size())));
    ranking_row(static_cast<index_t>(r), [&] {
      topk_from<Passes>(row.data(), std::ssize(row), std::ssize(best), range.begin, best.data(), scratch);
    });
    double top = 0, all = 0;
    for (const index_t i : best) top += static_cast<double>(scores.at(static_cast<index_t>(r), i));
    for (const float s : row) all += static_cast<double>(s);
    const double factor = all == 0 ? 1.0 : top / all;
    float* to = out.row(static_cast<index_t>(r)) + range.begin;
    for (std::size_t i = 0; i < row.size(); ++i) to[i] = static_cast<float>(factor * static_cast<double>(row[i]));
  });
}

// counts[r] >= lowest[r] and sum = total: the candidates of row r among the best of all rows together (ties: lower row,
// lower index), raised to lowest[r] where it has fewer there, at the cost of what the other rows have beyond theirs.
// 0 <= lowest[r] <= candidates of r; sum of lowest <= total <= candidates. At most rows + 1 linear passes.
inline void split_flat(const host_exec& exec, Matrix<const float> scores, std::span<IndexRange> candidates,
                       std::span<const HeadShare> shares, std::int64_t total, std::span<index_t> counts) {
  Arena own;
  const auto scratch = (exec.scratch ? *exec.scratch : own).take(flat_topk_scratch_bytes(scores.rows, scores.cols));
  std::vector<bool> settled(candidates.size(), false);
  std::vector<index_t> found(candidates.size());
  for (bool again = true; again;) {
    flat_topk_counts(scores, candidates, total, found, scratch);
    // A row below what is reserved for it is settled there. The others then share less, so the cut only rises: a
    // settled row would stay below it, and the order of settling does not matter.
    again = false;
    for (std::size_t r = 0; r < candidates.size(); ++r) {
      if (settled[r]) continue;
      counts[r] = found[r];
      if (found[r] >= shares[r].reserved) continue;
      settled[r] = again = true;
      counts[r] = shares[r].reserved;
      total -= shares[r].reserved;
      candidates[r] = {};
    }
  }
}

}  // namespace detail

// Rows of the range that each head keeps, out: [heads]. scores: [heads][rows of a head, those outside the range
// included]. O(heads * tokens) where no head is short of its reserve. Throws NanScore naming the first head.
inline void split_rows(const host_exec& exec, Matrix<const float> scores, const SharingHeads& heads,
                       const ScoreSplit& split, std::span<index_t> out) {
  std::vector<IndexRange> ranges, candidates;
  for (std::size_t h = 0; h < heads.tokens.size(); ++h) {
    const index_t first = heads.protections[h].before, end = first + heads.tokens[h];
    const ProtectedRows aside = split.shares[h].aside;
    ranges.push_back({first, end});
    candidates.push_back({first + aside.sinks, end - aside.newest});
  }
  std::vector<float> changed;
  const auto change = [&](auto&& rule) {
    changed.resize(static_cast<std::size_t>(scores.rows) * static_cast<std::size_t>(scores.cols));
    const Matrix<float> to{changed.data(), scores.rows, scores.cols, scores.cols};
    rule(to);
    scores = to;
  };
  if (split.softmax) change([&](Matrix<float> to) { detail::log_softmax(exec, scores, ranges, to); });
  if (split.weighed_by > 0)
    change([&](Matrix<float> to) { detail::weigh_by_best(exec, scores, candidates, split.weighed_by, to); });
  detail::split_flat(exec, scores, candidates, split.shares, split.ranked, out);
  for (std::size_t h = 0; h < out.size(); ++h) out[h] += split.shares[h].aside.count();
}

}  // namespace kvevict::inline KVEVICT_ABI
