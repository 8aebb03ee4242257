// The threshold of the k best of many scores, found without sorting (the sampled bracket):
//   1. a sample tells in which range of keys the k-th lies, with a margin of a few standard deviations;
//   2. one pass counts what lies above the range and collects what lies inside; it also sees every NaN;
//   3. the same again on what was collected, until a short list is left.
// A miss costs one more pass over the known side. The ends of a range are counted apart, so repeated values end a round
// at once; a round that removes less than a quarter hands over to radix buckets, so the worst case is linear.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvevict/cpu/detail/topk_passes.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

inline constexpr std::size_t radix_bins = KeyRange::bins;

// The k-th largest of keys[0, n), all inside the range, by buckets of equal width. 1 <= k <= n. At most four rounds,
// each over fewer keys. `above` counts from these keys only. Reorders.
template <class Passes>
KthKey kth_by_radix(std::int32_t* keys, std::int64_t n, std::int64_t k, KeyRange range, std::uint32_t* bins) {
  std::int64_t removed = 0;
  range = {range.hi, range.lo};  // what the keys really span, so that few of the buckets stay empty
  for (std::int64_t i = 0; i < n; ++i) range = {std::min(range.lo, keys[i]), std::max(range.hi, keys[i])};
  while (range.lo != range.hi) {
    const int shift = range.shift(n < 4096 ? 8 : KeyRange::digit_bits);  // few keys do not pay for many buckets
    std::uint32_t bin = range.width() >> shift;
    std::fill_n(bins, bin + 1, 0u);
    for (std::int64_t i = 0; i < n; ++i) ++bins[range.digit(keys[i], shift)];
    std::int64_t above = 0;
    while (above + bins[bin] < k) above += bins[bin--];
    k -= above;
    removed += above;
    range = range.of_digit(bin, shift);
    n = Passes::keep(keys, n, range);
  }
  return {range.lo, removed, n};
}

// One position in each of `samples` equal cells of [0, n), ascending; the multiplicative jitter keeps periodic data
// from aliasing with the stride. samples: a power of two, at most n; n < 2^31.
template <class At>
void take_sample(At at, std::int64_t n, std::int64_t samples, std::int32_t* out) {
  const int shift = std::countr_zero(static_cast<std::uint64_t>(samples));
  const auto length = static_cast<std::uint64_t>(n);
  for (std::uint32_t j = 0; j < static_cast<std::uint32_t>(samples); ++j) {
    const std::uint32_t place = (j << (32 - shift)) + (((j + 1) * 0x9e3779b1u) >> shift);  // of 2^32
    out[j] = at(static_cast<std::int64_t>((place * length) >> 32));
  }
}

// The range that holds the k-th of n keys most of the time, from a sample of them; open ends are `all`'s.
template <class Passes>
KeyRange bracket(std::int32_t* sample, std::int64_t samples, std::int64_t n, std::int64_t k, KeyRange all) {
  const double size = static_cast<double>(samples), share = static_cast<double>(k) / static_cast<double>(n);
  const double unseen = 1 - size / static_cast<double>(n);  // the sample is drawn without replacement
  const double margin = Passes::spread * std::sqrt(share * (1 - share) * size * unseen) + 1;
  const auto first = static_cast<std::int64_t>(std::floor(share * size - margin));
  const auto last = static_cast<std::int64_t>(std::ceil(share * size + margin));
  const KeyRange found =
      Passes::order_statistics(sample, samples, std::max<std::int64_t>(first, 0), std::min(last, samples - 1));
  const std::int32_t lo = last < samples ? std::max(found.lo, all.lo) : all.lo;
  const std::int32_t hi = std::min(found.hi, all.hi);
  // Few keys above the range cost less when they are collected with the rest than when they are told apart.
  const bool open = first < static_cast<std::int64_t>(Passes::open_share * size) && lo != hi;
  return {lo, open ? all.hi : hi};
}

// The k-th largest of keys[0, n), all inside the range. 1 <= k <= n. `above` counts from these keys only. Reorders.
// keys holds `room` entries in all, and Passes::slack more.
template <class Passes>
KthKey kth_of_keys(std::int32_t* keys, std::int64_t n, std::int64_t room, std::int64_t k, KeyRange range,
                   std::uint32_t* bins) {
  std::int64_t removed = 0;
  std::int32_t* const whole = keys;
  while (n > Passes::sampled_row && range.lo != range.hi) {
    std::int32_t sample[Passes::short_sample + Passes::slack];
    constexpr std::int64_t samples = Passes::short_sample;
    take_sample([keys](std::int64_t i) { return keys[i]; }, n, samples, sample);
    const KeyRange cut = bracket<Passes>(sample, samples, n, k, range);
    // Usually the cut holds the k-th key and little else. It is collected beside the keys, where there is room, and the
    // keys stay as they are for the other case.
    const bool in_front = keys == whole;
    if (in_front ? 2 * n <= room : n + Passes::slack <= keys - whole) {
      std::int32_t* const beside = in_front ? whole + n : whole;
      Collected found;
      Passes::template collect<KeyForm::positive>(keys, n, cut, beside, found);
      if (found.above < k && k <= found.above + found.inside && found.inside <= n / 4 * 3) {
        keys = beside;
        n = found.inside;
        k -= found.above;
        removed += found.above;
        range = cut;
        continue;
      }
    }
    const Ranked ranked = Passes::rank(keys, n, cut);
    std::int64_t above = 0;
    if (k <= ranked.above_hi) {
      range.lo = cut.hi + 1;
    } else if (k <= ranked.from_hi) {
      return {cut.hi, removed + ranked.above_hi, ranked.from_hi - ranked.above_hi};
    } else if (k <= ranked.above_lo) {
      range = {cut.lo + 1, cut.hi - 1};
      above = ranked.from_hi;
    } else if (k <= ranked.from_lo) {
      return {cut.lo, removed + ranked.above_lo, ranked.from_lo - ranked.above_lo};
    } else {
      range.hi = cut.lo - 1;
      above = ranked.from_lo;
    }
    k -= above;
    removed += above;
    const std::int64_t kept = Passes::keep(keys, n, range);
    const bool slow = kept > n - n / 4;
    n = kept;
    if (slow) break;
  }
  KthKey kth{range.lo, 0, n};
  if (range.lo != range.hi)
    kth = n <= Passes::short_row ? Passes::kth(keys, n, k) : kth_by_radix<Passes>(keys, n, k, range, bins);
  kth.above += removed;
  return kth;
}

// The threshold of the k best, and how many entries equal its key.
struct FoundThreshold {
  Threshold<std::int64_t> cut;
  std::int64_t equal = 0;
  bool nan = false;  // there is a NaN, and nothing else is known
};

// The threshold of the k best of all scores of a source, 1 <= k <= n = their number.
// Source: bits_type; infinity, the bits of +inf; each(f), which calls f(bits, count) for its runs in order; and
// reader(), a callable that gives the ordered key at ascending positions.
// keys: [n + Passes::slack]; bins: [radix_bins].
template <class Passes, class Source>
FoundThreshold find_threshold(const Source& source, std::int64_t n, std::int64_t k, std::int32_t* keys,
                              std::uint32_t* bins) {
  constexpr std::int32_t infinity = Source::infinity;
  constexpr KeyRange all{-infinity, infinity};
  KeyRange range = all;
  if (n > Passes::sampled_row) {
    std::int32_t sample[Passes::long_sample + Passes::slack];
    const std::int64_t samples = n < Passes::long_row ? Passes::short_sample : Passes::long_sample;
    take_sample(source.reader(), n, samples, sample);
    range = bracket<Passes>(sample, samples, n, k, all);
  }
  for (;;) {
    Collected found;
    const FoundThreshold threshold = with_form(range.lo, range.hi, [&]<KeyForm form>() -> FoundThreshold {
      const KeyRange bounds{bound_in_form<form>(range.lo),
                            range.hi == infinity ? no_bound : bound_in_form<form>(range.hi)};
      source.each([&](const auto* bits, std::int64_t count) {
        Passes::template collect<form>(bits, count, bounds, keys, found);
      });
      if (found.magnitude > infinity) return {{}, 0, true};
      if (k <= found.above || k > found.above + found.inside) return {};
      const std::int64_t rest = k - found.above;
      const KthKey kth = kth_of_keys<Passes>(keys, found.inside, n, rest, bounds, bins);
      return {{kth.key - bound_in_form<form>(0), rest - kth.above}, kth.equal};
    });
    if (threshold.nan || threshold.equal > 0) return threshold;
    // Missed: the k-th lies on one known side, and next time everything there is collected.
    if (k <= found.above) range = {range.hi + 1, infinity};
    else range = {-infinity, range.lo - 1};
  }
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
