// The k largest scores of a row as ascending indices: exact, ties to the lower index, linear for every input.
// Method: find the k-th largest score (topk_threshold.hpp), then one pass that writes the indices of what lies above it
// and of the first ties; nothing is sorted. -0 equals +0, infinities are ordinary values, a NaN is an error.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/topk_passes.hpp"
#include "kvevict/cpu/detail/topk_threshold.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/select/nan_score.hpp"
#include "kvevict/select/ordered_key.hpp"
#if KVEVICT_SIMD
#include "kvevict/cpu/detail/topk_passes_simd.hpp"
#endif

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

#if KVEVICT_SIMD
using Passes = SimdPasses;
#else
using Passes = PortablePasses;
#endif

// Bytes of n keys and of what passes may write behind them, rounded up so that what follows is aligned.
constexpr std::size_t key_bytes(std::int64_t n) noexcept {
  return (static_cast<std::size_t>(n + Passes::slack) * sizeof(std::int32_t) + 63) / 64 * 64;
}
constexpr std::size_t select_scratch_bytes(std::int64_t n) noexcept {
  return 64 + key_bytes(n) + radix_bins * sizeof(std::uint32_t);
}

// Working memory cut into its two parts.
struct SelectScratch {
  std::int32_t* keys;
  std::uint32_t* bins;

  SelectScratch(std::span<std::byte> memory, std::int64_t n, const char* who) {
    if (memory.size() < select_scratch_bytes(n))
      fail_argument(who, ": ", memory.size(), " bytes of scratch; ", select_scratch_bytes(n), " are required");
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    std::byte* aligned = memory.data() + (64 - address % 64) % 64;
    keys = reinterpret_cast<std::int32_t*>(aligned);
    bins = reinterpret_cast<std::uint32_t*>(aligned + key_bytes(n));
  }
};

// The storage of a score as a signed integer. Scores are read through it, which may_alias allows.
template <class T>
struct ScoreBits {
  using type [[gnu::may_alias]] = typename KeyTraits<T>::key_type;
};

// One row of scores.
template <class T>
struct RowSource {
  using bits_type = typename ScoreBits<T>::type;
  static constexpr std::int32_t infinity = KeyTraits<T>::infinity;
  const T* scores;
  std::int64_t n;

  const bits_type* bits() const noexcept { return reinterpret_cast<const bits_type*>(scores); }
  template <class F>
  void each(F&& f) const {
    f(bits(), n);
  }
  auto reader() const noexcept {
    return [p = scores](std::int64_t i) -> std::int32_t { return ordered_key(p[i]); };
  }
};

// Ranges of the rows of a matrix, one after the other.
struct RangeSource {
  using bits_type = typename ScoreBits<float>::type;
  static constexpr std::int32_t infinity = KeyTraits<float>::infinity;
  Matrix<const float> scores;
  std::span<const IndexRange> ranges;

  const float* row(std::size_t r) const noexcept { return scores.row(static_cast<index_t>(r)) + ranges[r].begin; }
  template <class F>
  void each(F&& f) const {
    for (std::size_t r = 0; r < ranges.size(); ++r)
      if (!ranges[r].empty()) f(reinterpret_cast<const bits_type*>(row(r)), std::int64_t{ranges[r].size()});
  }
  auto reader() const noexcept {
    return [this, r = std::size_t{0}, first = std::int64_t{0}](std::int64_t i) mutable -> std::int32_t {
      for (; ranges[r].empty() || i - first >= ranges[r].size(); ++r) first += std::max(ranges[r].size(), 0);
      return ordered_key(row(r)[i - first]);
    };
  }
};

// Position of the first NaN, or n.
template <class T>
std::int64_t find_nan(const T* scores, std::int64_t n) {
  std::int64_t i = 0;
  while (i < n && !is_nan_key<T>(ordered_key(scores[i]))) ++i;
  return i;
}

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_nan(index_t row, std::int64_t token) {
  throw NanScore(row, static_cast<index_t>(token));
}

// How many entries lie above an ordered key.
template <class Passes, class Bits>
std::int64_t count_above(const Bits* bits, std::int64_t n, std::int32_t key) {
  return with_form(
      key, key, [&]<KeyForm form>() { return Passes::template count_above<form>(bits, n, bound_in_form<form>(key)); });
}

// base + i for the k largest scores[i], ascending. 0 <= k <= n; out: [k].
template <class Passes, class T>
void topk_from(const T* scores, std::int64_t n, std::int64_t k, index_t base, index_t* out,
               std::span<std::byte> memory) {
  const SelectScratch scratch(memory, n, "topk");
  if (k == 0 || k == n) {
    if (const std::int64_t at = find_nan(scores, n); at < n) fail_nan(0, base + at);
    for (std::int64_t i = 0; i < k; ++i) out[i] = base + static_cast<index_t>(i);
    return;
  }
  const RowSource<T> source{scores, n};
  const FoundThreshold threshold = find_threshold<Passes>(source, n, k, scratch.keys, scratch.bins);
  if (threshold.nan) fail_nan(0, base + find_nan(scores, n));
  const auto emit = [&](std::int64_t first, std::int64_t last, std::int32_t bound, std::int64_t taken) {
    return taken + with_form(bound, bound, [&]<KeyForm form>() {
             return Passes::template emit<form>(source.bits() + first, last - first, bound_in_form<form>(bound),
                                                base + static_cast<index_t>(first), out + taken, k - taken);
           });
  };
  if (threshold.cut.ties == threshold.equal) {
    emit(0, n, threshold.cut.key - 1, 0);
    return;
  }
  // Only the first ties belong to the best: up to the last of them the bound lets equal scores in.
  const std::int64_t cut = with_form(threshold.cut.key, threshold.cut.key, [&]<KeyForm form>() {
    return Passes::template behind_equal<form>(source.bits(), n, bound_in_form<form>(threshold.cut.key),
                                               threshold.cut.ties);
  });
  emit(cut, n, threshold.cut.key, emit(0, cut, threshold.cut.key - 1, 0));
}

template <class T>
void topk(std::span<const T> scores, index_t k, std::span<index_t> out, std::span<std::byte> scratch) {
  const auto n = static_cast<std::int64_t>(scores.size());
  if (n > std::numeric_limits<index_t>::max())
    fail_argument("topk: ", n, " scores; at most ", std::numeric_limits<index_t>::max(), " are possible");
  if (k < 0 || k > n) fail_argument("topk: k = ", k, " of ", n, " scores; 0 to ", n, " is legal");
  if (out.size() != static_cast<std::size_t>(k))
    fail_argument("topk: out holds ", out.size(), " indices; k = ", k, " are written");
  topk_from<Passes>(scores.data(), n, k, 0, out.data(), scratch);
}

}  // namespace detail

// Working memory of topk() for n scores of any type.
constexpr std::size_t topk_scratch_bytes(std::int64_t n) noexcept { return detail::select_scratch_bytes(n); }

// Indices of the k largest scores [n], ascending; ties go to the lower index. 0 <= k <= n; out: [k];
// scratch: topk_scratch_bytes(n). O(n). Throws NanScore for a NaN anywhere in scores.
inline void topk(std::span<const float> scores, index_t k, std::span<index_t> out, std::span<std::byte> scratch) {
  detail::topk(scores, k, out, scratch);
}
inline void topk(std::span<const fp16_t> scores, index_t k, std::span<index_t> out, std::span<std::byte> scratch) {
  detail::topk(scores, k, out, scratch);
}
inline void topk(std::span<const bf16_t> scores, index_t k, std::span<index_t> out, std::span<std::byte> scratch) {
  detail::topk(scores, k, out, scratch);
}

// Working memory of flat_topk_counts() for a matrix [rows][cols].
constexpr std::size_t flat_topk_scratch_bytes(index_t rows, index_t cols) noexcept {
  return detail::select_scratch_bytes(std::int64_t{rows} * cols);
}

// How many of the k best entries of all candidate ranges together fall in each row; equal scores go to the lower row,
// then to the lower index. candidates: [rows], an empty range takes no part; counts: [rows]; 0 <= k <= candidates;
// scratch: flat_topk_scratch_bytes(rows, cols). O(candidates), nothing is sorted. Throws NanScore.
inline void flat_topk_counts(Matrix<const float> scores, std::span<const IndexRange> candidates, std::int64_t k,
                             std::span<index_t> counts, std::span<std::byte> scratch) {
  const auto rows = static_cast<std::size_t>(scores.rows);
  if (candidates.size() != rows || counts.size() != rows)
    fail_argument("flat_topk_counts: ", candidates.size(), " ranges and ", counts.size(), " counts for ", rows,
                  " rows; one of each per row is required");
  std::int64_t n = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    counts[r] = 0;
    if (candidates[r].empty()) continue;
    if (candidates[r].begin < 0 || candidates[r].end > scores.cols)
      fail_argument("flat_topk_counts: row ", r, ": range [", candidates[r].begin, ", ", candidates[r].end,
                    ") leaves the ", scores.cols, " columns");
    n += candidates[r].size();
  }
  if (k < 0 || k > n) fail_argument("flat_topk_counts: k = ", k, " of ", n, " candidates; 0 to ", n, " is legal");
  const detail::SelectScratch memory(scratch, n, "flat_topk_counts");
  const detail::RangeSource source{scores, candidates};
  const auto fail_at_nan = [&] {
    for (std::size_t r = 0; r < rows; ++r)
      if (!candidates[r].empty())
        if (const std::int64_t at = detail::find_nan(source.row(r), candidates[r].size()); at < candidates[r].size())
          detail::fail_nan(static_cast<index_t>(r), candidates[r].begin + at);
  };
  if (k == 0 || k == n) {
    fail_at_nan();
    if (k == n)
      for (std::size_t r = 0; r < rows; ++r) counts[r] = std::max(candidates[r].size(), 0);
    return;
  }
  detail::FoundThreshold threshold = detail::find_threshold<detail::Passes>(source, n, k, memory.keys, memory.bins);
  if (threshold.nan) fail_at_nan();
  std::size_t r = 0;
  source.each([&](const auto* bits, std::int64_t count) {
    while (candidates[r].empty()) ++r;
    const std::int64_t above = detail::count_above<detail::Passes>(bits, count, threshold.cut.key);
    const std::int64_t equal = detail::count_above<detail::Passes>(bits, count, threshold.cut.key - 1) - above;
    const std::int64_t ties = std::min(equal, threshold.cut.ties);
    threshold.cut.ties -= ties;
    counts[r++] = static_cast<index_t>(above + ties);
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
