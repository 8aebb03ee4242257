// The passes that top-k is made of, in standard C++; topk_passes_simd.hpp has the same ones in vector code.
// Keys are compared in one of three forms, so that the usual case reads the bits of a score as they are:
//   positive  a bound above zero: the bits themselves, as signed integers
//   negative  a bound below zero: the bits with the magnitude flipped, which is the ordered key less one
//   any       ordered keys
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "kvevict/core/shape.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

enum class KeyForm { positive, negative, any };

// The key of `bits` in a form. magnitude: the largest value of the storage type.
template <KeyForm form>
constexpr std::int32_t key_in_form(std::int32_t bits, std::int32_t magnitude) noexcept {
  if constexpr (form == KeyForm::positive) return bits;
  else if constexpr (form == KeyForm::negative) return bits ^ magnitude;
  else return bits < 0 ? -(bits & magnitude) : bits;
}

// A bound given as an ordered key, in the form.
template <KeyForm form>
constexpr std::int32_t bound_in_form(std::int32_t ordered) noexcept {
  return form == KeyForm::negative ? ordered - 1 : ordered;
}

// A range whose upper end is this is open: nothing lies above it.
inline constexpr std::int32_t no_bound = std::numeric_limits<std::int32_t>::max();

// Calls f.template operator()<form>() with the form that fits comparisons with ordered keys in [lo, hi].
template <class F>
constexpr auto with_form(std::int32_t lo, std::int32_t hi, F&& f) {
  if (lo > 0) return f.template operator()<KeyForm::positive>();
  if (hi < 0) return f.template operator()<KeyForm::negative>();
  return f.template operator()<KeyForm::any>();
}

// Keys above a range, keys inside it, and the largest magnitude seen (NaN lies above infinity).
struct Collected {
  std::int64_t above = 0, inside = 0;
  std::int32_t magnitude = 0;
};

// How many keys exceed or reach the ends of a range.
struct Ranked {
  std::int64_t above_hi = 0, from_hi = 0, above_lo = 0, from_lo = 0;
};

// The k-th largest key: how many entries exceed it and how many equal it.
struct KthKey {
  std::int32_t key;
  std::int64_t above, equal;
};

struct PortablePasses {
  static constexpr const char* name = "portable";
  static constexpr std::int64_t sampled_row = 2048;  // above this many keys a sample is taken, which has fewer
  static constexpr std::int64_t short_row = 64;      // up to here the k-th key is found directly
  static constexpr std::int64_t short_sample = 256, long_sample = 1024, long_row = 65536;
  static constexpr double open_share = 0.0;  // with less than this share above the range, it is left open
  static constexpr double spread = 3.0;      // half the bracket, in standard deviations of the sample
  static constexpr std::int64_t slack = 64;  // entries that may be written behind the last key

  // Counts keys above the range and appends those inside to out (in the form), from out[found.inside] on.
  template <KeyForm form, class Bits>
  static void collect(const Bits* bits, std::int64_t n, KeyRange range, std::int32_t* out, Collected& found) {
    constexpr std::int32_t most = std::numeric_limits<Bits>::max();
    const auto width = static_cast<std::uint32_t>(range.hi) - static_cast<std::uint32_t>(range.lo);
    for (std::int64_t first = 0; first < n; first += 512) {  // two loops, of which compilers vectorise the first
      const std::int64_t last = std::min<std::int64_t>(n, first + 512);
      std::int32_t above = 0, magnitude = found.magnitude;
      for (std::int64_t i = first; i < last; ++i) {
        above += key_in_form<form>(bits[i], most) > range.hi;
        magnitude = std::max(magnitude, bits[i] & most);
      }
      found.above += above;
      found.magnitude = magnitude;
      std::int64_t inside = found.inside;
      for (std::int64_t i = first; i < last; ++i) {
        const std::int32_t key = key_in_form<form>(bits[i], most);
        out[inside] = key;
        inside += static_cast<std::uint32_t>(key) - static_cast<std::uint32_t>(range.lo) <= width;
      }
      found.inside = inside;
    }
  }

  static Ranked rank(const std::int32_t* keys, std::int64_t n, KeyRange range) {
    std::int32_t above_hi = 0, from_hi = 0, above_lo = 0, from_lo = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      above_hi += keys[i] > range.hi;
      from_hi += keys[i] >= range.hi;
      above_lo += keys[i] > range.lo;
      from_lo += keys[i] >= range.lo;
    }
    return {above_hi, from_hi, above_lo, from_lo};
  }

  // Moves the keys inside the range to the front; returns how many.
  static std::int64_t keep(std::int32_t* keys, std::int64_t n, KeyRange range) {
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t key = keys[i];
      keys[kept] = key;
      kept += (key >= range.lo) & (key <= range.hi);
    }
    return kept;
  }

  // The keys at two places of the descending order, first <= last < n. Reorders.
  static KeyRange order_statistics(std::int32_t* keys, std::int64_t n, std::int64_t first, std::int64_t last) {
    std::nth_element(keys, keys + last, keys + n, std::greater<>{});
    const std::int32_t lo = keys[last];
    std::nth_element(keys, keys + first, keys + last + 1, std::greater<>{});
    return {lo, keys[first]};
  }

  // n <= short_row. Reorders.
  static KthKey kth(std::int32_t* keys, std::int64_t n, std::int64_t k) {
    const std::int32_t key = order_statistics(keys, n, k - 1, k - 1).lo;
    const Ranked ranked = rank(keys, n, {key, key});
    return {key, ranked.above_lo, ranked.from_lo - ranked.above_lo};
  }

  template <KeyForm form, class Bits>
  static std::int64_t count_above(const Bits* bits, std::int64_t n, std::int32_t bound) {
    constexpr std::int32_t most = std::numeric_limits<Bits>::max();
    std::int32_t count = 0;
    for (std::int64_t i = 0; i < n; ++i) count += key_in_form<form>(bits[i], most) > bound;
    return count;
  }

  // The position behind the count-th entry whose key (in the form) is `key`; there are at least count >= 1 of them.
  template <KeyForm form, class Bits>
  static std::int64_t behind_equal(const Bits* bits, [[maybe_unused]] std::int64_t n, std::int32_t key,
                                   std::int64_t count) {
    constexpr std::int32_t most = std::numeric_limits<Bits>::max();
    std::int64_t i = 0;
    for (; count > 0; ++i) count -= key_in_form<form>(bits[i], most) == key;
    return i;
  }

  // Writes base + i for the keys above the bound, i in [0, n), to out until it holds `room` entries; returns how many
  // were written.
  template <KeyForm form, class Bits>
  static std::int64_t emit(const Bits* bits, std::int64_t n, std::int32_t bound, index_t base, index_t* out,
                           std::int64_t room) {
    constexpr std::int32_t most = std::numeric_limits<Bits>::max();
    std::int64_t taken = 0;
    for (std::int64_t i = 0; i < n && taken < room; ++i) {
      out[taken] = base + static_cast<index_t>(i);
      taken += key_in_form<form>(bits[i], most) > bound;  // no branch: it would be mispredicted
    }
    return taken;
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
