// The passes of topk_passes.hpp in vector code, written once with Highway for whatever the translation unit is compiled
// for.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kvevict/core/shape.hpp"
#include "kvevict/core/simd.hpp"
#include "kvevict/select/topk_passes.hpp"

#if KVEVICT_SIMD
HWY_BEFORE_NAMESPACE();
namespace kvevict::detail {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using KeyTag = hn::ScalableTag<std::int32_t>;
using KeyVector = hn::Vec<KeyTag>;
inline constexpr std::int64_t lanes = static_cast<std::int64_t>(HWY_LANES(std::int32_t));

// One vector of the bits of scores; 16-bit ones are widened with their sign.
template <class Bits>
HWY_INLINE KeyVector load_bits(const Bits* p) {
  const hn::Rebind<Bits, KeyTag> d;
  if constexpr (sizeof(Bits) == 4) return hn::LoadU(d, p);
  else return hn::PromoteTo(KeyTag(), hn::LoadU(d, p));
}

template <KeyForm form>
HWY_INLINE KeyVector key_in_form(KeyVector bits, KeyVector magnitude) {
  if constexpr (form == KeyForm::positive) {
    return bits;
  } else if constexpr (form == KeyForm::negative) {
    return hn::Xor(bits, magnitude);
  } else {
    const KeyVector sign = hn::ShiftRight<31>(bits);
    return hn::Sub(hn::Xor(hn::And(bits, magnitude), sign), sign);
  }
}

struct VectorPasses {
  static constexpr const char* name = simd_target();
  static constexpr std::int64_t short_row = 128;
  static constexpr std::int64_t short_sample = 64, long_sample = 128, long_row = 65536;
  static constexpr double spread = 2.0;
  static constexpr std::int64_t slack = 64;

  template <KeyForm form, class Bits>
  static HWY_NOINLINE void collect(const Bits* HWY_RESTRICT bits, std::int64_t n, KeyRange range,
                                   std::int32_t* HWY_RESTRICT out, Collected& found) {
    const KeyTag d;
    constexpr std::int32_t most = std::numeric_limits<Bits>::max();
    const KeyVector mask = hn::Set(d, most), hi = hn::Set(d, range.hi), below = hn::Set(d, range.lo - 1);
    KeyVector largest = hn::Zero(d);
    std::int64_t inside = found.inside, from = 0, i = 0;
    const std::int64_t before = inside;
    for (; i + lanes <= n; i += lanes) {
      const KeyVector b = load_bits(bits + i), key = key_in_form<form>(b, mask);
      largest = hn::Max(largest, hn::And(b, mask));
      const auto reaches = hn::Gt(key, below), in = hn::AndNot(hn::Gt(key, hi), reaches);
      from += static_cast<std::int64_t>(hn::CountTrue(d, reaches));
      hn::StoreU(hn::Compress(key, in), d, out + inside);
      inside += static_cast<std::int64_t>(hn::CountTrue(d, in));
    }
    found.above += from - (inside - before);
    found.inside = inside;
    found.magnitude = std::max(found.magnitude, hn::GetLane(hn::MaxOfLanes(d, largest)));
    if (i < n) PortablePasses::collect<form>(bits + i, n - i, range, out, found);
  }

  static HWY_NOINLINE Ranked rank(const std::int32_t* keys, std::int64_t n, KeyRange range) {
    const KeyTag d;
    const KeyVector hi = hn::Set(d, range.hi), lo = hn::Set(d, range.lo);
    const KeyVector below_hi = hn::Set(d, range.hi - 1), below_lo = hn::Set(d, range.lo - 1);
    std::size_t above_hi = 0, from_hi = 0, above_lo = 0, from_lo = 0;
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      const KeyVector key = hn::LoadU(d, keys + i);
      above_hi += hn::CountTrue(d, hn::Gt(key, hi));
      from_hi += hn::CountTrue(d, hn::Gt(key, below_hi));
      above_lo += hn::CountTrue(d, hn::Gt(key, lo));
      from_lo += hn::CountTrue(d, hn::Gt(key, below_lo));
    }
    const Ranked tail = PortablePasses::rank(keys + i, n - i, range);
    return {static_cast<std::int64_t>(above_hi) + tail.above_hi, static_cast<std::int64_t>(from_hi) + tail.from_hi,
            static_cast<std::int64_t>(above_lo) + tail.above_lo, static_cast<std::int64_t>(from_lo) + tail.from_lo};
  }

  static HWY_NOINLINE std::int64_t keep(std::int32_t* keys, std::int64_t n, KeyRange range) {
    const KeyTag d;
    const KeyVector hi = hn::Set(d, range.hi), below = hn::Set(d, range.lo - 1);
    std::int64_t kept = 0, i = 0;
    for (; i + lanes <= n; i += lanes) {
      const KeyVector key = hn::LoadU(d, keys + i);
      const auto in = hn::AndNot(hn::Gt(key, hi), hn::Gt(key, below));
      hn::StoreU(hn::Compress(key, in), d, keys + kept);
      kept += static_cast<std::int64_t>(hn::CountTrue(d, in));
    }
    for (; i < n; ++i) {
      const std::int32_t key = keys[i];
      keys[kept] = key;
      kept += (key >= range.lo) & (key <= range.hi);
    }
    return kept;
  }

  // above[i] = keys greater than keys[i]. n: a multiple of 4 * lanes.
  static HWY_INLINE void count_greater(const std::int32_t* keys, std::int64_t n, std::int32_t* above) {
    const KeyTag d;
    const KeyVector one = hn::Set(d, 1);
    for (std::int64_t a = 0; a < n; a += 4 * lanes) {
      const KeyVector v0 = hn::LoadU(d, keys + a), v1 = hn::LoadU(d, keys + a + lanes);
      const KeyVector v2 = hn::LoadU(d, keys + a + 2 * lanes), v3 = hn::LoadU(d, keys + a + 3 * lanes);
      KeyVector c0 = hn::Zero(d), c1 = c0, c2 = c0, c3 = c0;
      const auto count = [&](KeyVector c, KeyVector other, KeyVector v) HWY_ATTR {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
        return hn::IfThenElse(hn::Gt(other, v), hn::Add(c, one), c);
#else
        return hn::Sub(c, hn::VecFromMask(d, hn::Gt(other, v)));
#endif
      };
      for (std::int64_t j = 0; j < n; ++j) {
        const KeyVector other = hn::Set(d, keys[j]);
        c0 = count(c0, other, v0);
        c1 = count(c1, other, v1);
        c2 = count(c2, other, v2);
        c3 = count(c3, other, v3);
      }
      hn::StoreU(c0, d, above + a);
      hn::StoreU(c1, d, above + a + lanes);
      hn::StoreU(c2, d, above + a + 2 * lanes);
      hn::StoreU(c3, d, above + a + 3 * lanes);
    }
    (void)one;
  }

  // The key at a place of the descending order: the least one with at most `place` keys above it.
  static HWY_INLINE std::int32_t key_at(const std::int32_t* keys, const std::int32_t* above, std::int64_t n,
                                        std::int64_t place) {
    const KeyTag d;
    const KeyVector limit = hn::Set(d, static_cast<std::int32_t>(place)),
                    none = hn::Set(d, hwy::LimitsMax<std::int32_t>());
    KeyVector least = none;
    for (std::int64_t i = 0; i < n; i += lanes)
      least = hn::Min(least, hn::IfThenElse(hn::Gt(hn::LoadU(d, above + i), limit), none, hn::LoadU(d, keys + i)));
    return hn::GetLane(hn::MinOfLanes(d, least));
  }

  // n: a multiple of 64, at most 128.
  static KeyRange order_statistics(std::int32_t* keys, std::int64_t n, std::int64_t first, std::int64_t last) {
    HWY_ALIGN std::int32_t above[128];
    count_greater(keys, n, above);
    return {key_at(keys, above, n, last), key_at(keys, above, n, first)};
  }

  static HWY_NOINLINE KthKey kth(std::int32_t* keys, std::int64_t n, std::int64_t k) {
    HWY_ALIGN std::int32_t above[128];
    const std::int64_t padded = (n + 4 * lanes - 1) / (4 * lanes) * (4 * lanes);
    std::fill(keys + n, keys + padded, std::numeric_limits<std::int32_t>::min());  // below every key
    count_greater(keys, padded, above);
    const std::int32_t key = key_at(keys, above, padded, k - 1);
    const Ranked ranked = rank(keys, n, {key, key});
    return {key, ranked.above_lo, ranked.from_lo - ranked.above_lo};
  }

  template <KeyForm form, class Bits>
  static HWY_NOINLINE std::int64_t count_above(const Bits* bits, std::int64_t n, std::int32_t bound) {
    const KeyTag d;
    const KeyVector mask = hn::Set(d, std::int32_t{std::numeric_limits<Bits>::max()}), limit = hn::Set(d, bound);
    std::size_t count = 0;
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
      count += hn::CountTrue(d, hn::Gt(key_in_form<form>(load_bits(bits + i), mask), limit));
    return static_cast<std::int64_t>(count) + PortablePasses::count_above<form>(bits + i, n - i, bound);
  }

  template <KeyForm form, class Bits>
  static HWY_NOINLINE std::int64_t emit(const Bits* HWY_RESTRICT bits, std::int64_t n, std::int32_t bound, index_t base,
                                        index_t* HWY_RESTRICT out, std::int64_t room) {
    const KeyTag d;
    const KeyVector mask = hn::Set(d, std::int32_t{std::numeric_limits<Bits>::max()}), limit = hn::Set(d, bound);
    const KeyVector step = hn::Set(d, static_cast<std::int32_t>(lanes));
    KeyVector index = hn::Iota(d, base);
    std::int64_t taken = 0, i = 0;
    for (; i + lanes <= n && taken + lanes <= room; i += lanes) {
      const auto take = hn::Gt(key_in_form<form>(load_bits(bits + i), mask), limit);
      hn::StoreU(hn::Compress(index, take), d, out + taken);
      taken += static_cast<std::int64_t>(hn::CountTrue(d, take));
      index = hn::Add(index, step);
    }
    for (; i + lanes <= n && taken < room; i += lanes) {  // a full vector no longer fits
      const auto take = hn::Gt(key_in_form<form>(load_bits(bits + i), mask), limit);
      const std::int64_t count = std::min(static_cast<std::int64_t>(hn::CountTrue(d, take)), room - taken);
      hn::BlendedStore(hn::Compress(index, take), hn::FirstN(d, static_cast<std::size_t>(count)), d, out + taken);
      taken += count;
      index = hn::Add(index, step);
    }
    return taken + PortablePasses::emit<form>(bits + i, n - i, bound, base + static_cast<index_t>(i), out + taken,
                                              room - taken);
  }
};

}  // namespace HWY_NAMESPACE
using SimdPasses = HWY_NAMESPACE::VectorPasses;
}  // namespace kvevict::detail
HWY_AFTER_NAMESPACE();
#endif
