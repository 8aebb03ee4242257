// Top-k in standard C++: the k-th largest key by radix buckets, then one pass that writes the indices.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvevict/core/shape.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::detail {

// Which entries are taken: all above `key`, and the first `ties` that equal it.
template <class K>
struct Threshold {
  K key;
  std::int64_t ties;
};

inline constexpr int radix_bits = 11;
inline constexpr std::size_t radix_bins = std::size_t{1} << radix_bits;

// The threshold of the k largest of keys[0, n), 1 <= k <= n, all within [lo, hi]. Reorders keys. O(n).
template <class K>
Threshold<K> radix_threshold(K* keys, std::int64_t n, std::int64_t k, K lo, K hi, std::uint32_t* bins) {
  for (;;) {
    const auto width = static_cast<std::uint32_t>(std::int64_t{hi} - lo);
    if (width == 0) return {lo, k};
    const int shift = std::max(0, static_cast<int>(std::bit_width(width)) - radix_bits);
    const auto digit = [lo, shift](K key) { return static_cast<std::uint32_t>(std::int64_t{key} - lo) >> shift; };
    std::fill_n(bins, (width >> shift) + 1, 0u);
    for (std::int64_t i = 0; i < n; ++i) ++bins[digit(keys[i])];
    std::uint32_t bin = width >> shift;
    std::int64_t above = 0;
    while (above + bins[bin] < k) above += bins[bin--];
    k -= above;
    const std::int64_t first = std::int64_t{lo} + (std::int64_t{bin} << shift);
    hi = static_cast<K>(std::min<std::int64_t>(hi, first + (std::int64_t{1} << shift) - 1));
    lo = static_cast<K>(first);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const K key = keys[i];
      keys[kept] = key;
      kept += lo <= key && key <= hi;
    }
    n = kept;
  }
}

// Position of the first NaN, or n.
template <class T>
std::int64_t find_nan(const T* scores, std::int64_t n) {
  std::int64_t i = 0;
  while (i < n && !is_nan_key<T>(ordered_key(scores[i]))) ++i;
  return i;
}

// Writes base + i for the k entries that the threshold takes, ascending.
template <class T, class K>
void emit_portable(const T* scores, std::int64_t k, Threshold<K> threshold, index_t base, index_t* out) {
  std::int64_t taken = 0, i = 0;
  for (; taken < k && threshold.ties > 0; ++i) {
    const K key = ordered_key(scores[i]);
    const bool equal = key == threshold.key;
    out[taken] = base + static_cast<index_t>(i);
    taken += (key > threshold.key) + equal;  // a sum, not ||: no branch to mispredict
    threshold.ties -= equal;
  }
  for (; taken < k; ++i) {
    out[taken] = base + static_cast<index_t>(i);
    taken += ordered_key(scores[i]) > threshold.key;
  }
}

}  // namespace kvevict::detail
