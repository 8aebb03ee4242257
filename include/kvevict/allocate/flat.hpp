// Heads compared with each other: what Ada-KV (one layer) and global allocation (all layers) share. Scores of several
// heads are ranked as one list; each head gets what it has among the best, but at least its floor.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/topk.hpp"

namespace kvevict::inline KVEVICT_ABI {

// How scores of different heads become comparable. automatic: as they are where the scorer says that they are
// comparable, else softmax; none: as they are; softmax: normalised by softmax per head.
enum class Normalize { automatic, none, softmax };
constexpr auto words_of(Normalize) noexcept { return std::to_array<std::string_view>({"auto", "none", "softmax"}); }

namespace detail {

// Rows of a head that are set aside before scores decide, where `total` rows go to `heads` heads (m = total / heads):
// at most ceil(m / 2) with protect=half, floor(m) with protect=full. The heads' sums stay within the total.
constexpr ProtectedRows set_aside(Protect protect, index_t tokens, std::int64_t total, std::int64_t heads) noexcept {
  const std::int64_t most = protect.share == ProtectShare::half ? (total + 2 * heads - 1) / (2 * heads)
                                                                : std::max<std::int64_t>(1, total / heads);
  const std::int64_t held = std::min<std::int64_t>(most, tokens);
  return protect_at_most(protect_asked(protect, tokens), static_cast<index_t>(held));
}

// Log of the softmax of each row of `scores` over its finite entries: the same order as softmax, but small shares keep
// theirs where a float softmax would underflow to equal zeros. Infinities and NaN stay. tokens: [rows].
inline void log_softmax(const host_exec& exec, Matrix<const float> scores, std::span<const index_t> tokens,
                        Matrix<float> out) {
  parallel_for(exec, scores.rows, [&](std::int64_t r) {
    const float* in = scores.row(static_cast<index_t>(r));
    float* to = out.row(static_cast<index_t>(r));
    const index_t n = tokens[static_cast<std::size_t>(r)];
    float most = -std::numeric_limits<float>::infinity();
    for (index_t i = 0; i < n; ++i)
      if (std::isfinite(in[i])) most = std::max(most, in[i]);
    double sum = 0;
    for (index_t i = 0; i < n; ++i)
      if (std::isfinite(in[i])) sum += static_cast<double>(std::exp(in[i] - most));
    const auto log_sum = static_cast<float>(std::log(sum));
    for (index_t i = 0; i < n; ++i) to[i] = std::isfinite(in[i]) ? (in[i] - most) - log_sum : in[i];
  });
}

// counts[r] >= least[r] and sum = total: the candidates of row r among the best of all rows together (ties: lower row,
// lower index), raised to least[r] where it has fewer there, at the cost of what the other rows have beyond theirs.
// 0 <= least[r] <= candidates of r; sum of least <= total <= candidates. At most rows + 1 linear passes.
inline void split_flat(const host_exec& exec, Matrix<const float> scores, std::span<IndexRange> candidates,
                       std::span<const index_t> least, std::int64_t total, std::span<index_t> counts) {
  Arena own;
  const auto scratch = (exec.scratch ? *exec.scratch : own).take(flat_topk_scratch_bytes(scores.rows, scores.cols));
  std::vector<bool> settled(candidates.size(), false);
  std::vector<index_t> found(candidates.size());
  for (bool again = true; again;) {
    flat_topk_counts(scores, candidates, total, found, scratch);
    // A row below its floor is settled there. The others then share less, so the cut only rises: a settled row would
    // stay below its floor, and the order of settling does not matter.
    again = false;
    for (std::size_t r = 0; r < candidates.size(); ++r) {
      if (settled[r]) continue;
      counts[r] = found[r];
      if (found[r] >= least[r]) continue;
      settled[r] = again = true;
      counts[r] = least[r];
      total -= least[r];
      candidates[r] = {};
    }
  }
}

}  // namespace detail
}  // namespace kvevict::inline KVEVICT_ABI
