// The k largest scores of a row as ascending indices: exact, ties to the lower index, linear for every input.
// Method: find the k-th largest score (a threshold and the number of ties that still fit), then one pass that writes
// the indices; nothing is sorted. -0 equals +0, infinities are ordinary values, a NaN is an error.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/select/ordered_key.hpp"
#include "kvevict/select/topk_portable.hpp"

namespace kvevict {

// A score that is NaN: its row (0 where there is one row only) and its index there.
struct NanScore : std::domain_error {
  index_t row, token;
  NanScore(index_t at_row, index_t at_token)
      : std::domain_error(
            text("NaN score in row ", at_row, ", token ", at_token, "; a number or an infinity is required")),
        row(at_row),
        token(at_token) {}
};

// Positions [begin, end) of a row.
struct IndexRange {
  index_t begin = 0, end = 0;
  constexpr index_t size() const noexcept { return end - begin; }
  constexpr bool empty() const noexcept { return end <= begin; }
};

namespace detail {

// Bytes of keys for n entries of 4 bytes, rounded up so that what follows is aligned.
constexpr std::size_t key_bytes(std::int64_t n) noexcept {
  return (static_cast<std::size_t>(n) * sizeof(std::int32_t) + 255) / 64 * 64;
}
constexpr std::size_t select_scratch_bytes(std::int64_t n) noexcept {
  return 64 + key_bytes(n) + radix_bins * sizeof(std::uint32_t);
}
// The first 64-byte boundary in scratch; throws where less than `need` bytes were given.
inline std::byte* aligned_scratch(std::span<std::byte> scratch, std::size_t need, const char* what) {
  if (scratch.size() < need) fail_argument(what, ": ", scratch.size(), " bytes of scratch; ", need, " are required");
  const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
  return scratch.data() + (64 - address % 64) % 64;
}

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_nan(index_t row, std::int64_t token) {
  throw NanScore(row, static_cast<index_t>(token));
}

// base + i for the k largest scores[i], ascending. 0 <= k <= n; out: [k].
template <class T>
void topk_from(const T* scores, std::int64_t n, std::int64_t k, index_t base, index_t* out,
               std::span<std::byte> scratch) {
  using K = typename KeyTraits<T>::key_type;
  std::byte* memory = aligned_scratch(scratch, select_scratch_bytes(n), "topk");
  auto* keys = reinterpret_cast<K*>(memory);
  auto* bins = reinterpret_cast<std::uint32_t*>(memory + key_bytes(n));
  if (const std::int64_t at = find_nan(scores, n); at < n) fail_nan(0, base + at);
  if (k == 0) return;
  if (k == n) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = base + static_cast<index_t>(i);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) keys[i] = ordered_key(scores[i]);
  constexpr K most = KeyTraits<T>::infinity;
  const Threshold<K> threshold = radix_threshold(keys, n, k, static_cast<K>(-most), most, bins);
  emit_portable(scores, k, threshold, base, out);
}

template <class T>
void topk(std::span<const T> scores, index_t k, std::span<index_t> out, std::span<std::byte> scratch) {
  const auto n = static_cast<std::int64_t>(scores.size());
  if (n > std::numeric_limits<index_t>::max())
    fail_argument("topk: ", n, " scores; at most ", std::numeric_limits<index_t>::max(), " are possible");
  if (k < 0 || k > n) fail_argument("topk: k = ", k, " of ", n, " scores; 0 to ", n, " is legal");
  if (out.size() != static_cast<std::size_t>(k))
    fail_argument("topk: out holds ", out.size(), " indices; k = ", k, " are written");
  topk_from(scores.data(), n, k, 0, out.data(), scratch);
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
  std::byte* memory = detail::aligned_scratch(scratch, detail::select_scratch_bytes(n), "flat_topk_counts");
  auto* keys = reinterpret_cast<std::int32_t*>(memory);
  auto* bins = reinterpret_cast<std::uint32_t*>(memory + detail::key_bytes(n));
  std::int64_t at = 0;
  for (index_t r = 0; r < scores.rows; ++r) {
    const IndexRange range = candidates[static_cast<std::size_t>(r)];
    if (range.empty()) continue;
    const float* row = scores.row(r) + range.begin;
    if (const std::int64_t nan = detail::find_nan(row, range.size()); nan < range.size())
      detail::fail_nan(r, range.begin + nan);
    for (index_t i = 0; i < range.size(); ++i) keys[at++] = detail::ordered_key(row[i]);
  }
  if (k == 0) return;
  constexpr std::int32_t most = detail::KeyTraits<float>::infinity;
  auto threshold = detail::radix_threshold(keys, n, k, -most, most, bins);
  for (index_t r = 0; r < scores.rows; ++r) {
    const IndexRange range = candidates[static_cast<std::size_t>(r)];
    if (range.empty()) continue;
    const float* row = scores.row(r) + range.begin;
    index_t above = 0, equal = 0;
    for (index_t i = 0; i < range.size(); ++i) {
      const std::int32_t key = detail::ordered_key(row[i]);
      above += key > threshold.key;
      equal += key == threshold.key;
    }
    const auto ties = static_cast<index_t>(std::min<std::int64_t>(equal, threshold.ties));
    threshold.ties -= ties;
    counts[static_cast<std::size_t>(r)] = above + ties;
  }
}

}  // namespace kvevict
