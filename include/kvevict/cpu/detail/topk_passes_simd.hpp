// The passes of topk_passes.hpp in vector code, written once with Highway for whatever the translation unit is compiled
// for.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/topk_emit_avx512.hpp"
#include "kvevict/cpu/detail/topk_passes.hpp"
#include "kvevict/cpu/simd.hpp"

#if KVEVICT_SIMD
HWY_BEFORE_NAMESPACE();
namespace kvevict::inline KVEVICT_ABI::detail {
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

// The lanes of a mask as bits.
template <class Mask>
HWY_INLINE std::uint32_t lane_bits(Mask mask) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return static_cast<std::uint32_t>(mask.raw);
#elif HWY_TARGET == HWY_AVX2
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask.raw)));
#else
  std::uint8_t bits[8] = {};
  hn::StoreMaskBits(KeyTag(), mask, bits);
  return bits[0];
#endif
}

#if HWY_TARGET == HWY_AVX2
// For each of the 256 masks: the set lanes in ascending order, one a byte. g++ 12 copies the table inside Highway's
// Compress to the stack at each call, which makes it ten times slower.
inline constexpr struct LaneTable {
  std::uint64_t of[256];
  constexpr LaneTable() : of{} {
    for (std::uint64_t mask = 0; mask < 256; ++mask) {
      int place = 0;
      for (std::uint64_t lane = 0; lane < 8; ++lane)
        if ((mask >> lane & 1) != 0) of[mask] |= lane << (8 * place++);
    }
  }
} lane_table;

HWY_INLINE KeyVector set_lanes(std::uint32_t bits) {
  return KeyVector{_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(lane_table.of + bits)))};
}
#endif

// The lanes of a mask moved to the front; what is behind them is unspecified.
template <class Mask>
HWY_INLINE KeyVector compress(KeyVector v, [[maybe_unused]] Mask mask, [[maybe_unused]] std::uint32_t bits) {
#if HWY_TARGET == HWY_AVX2
  return KeyVector{_mm256_permutevar8x32_epi32(v.raw, set_lanes(bits).raw)};
#else
  return hn::Compress(v, mask);
#endif
}

// first + lane for the lanes of a mask, moved to the front. `index` is Iota(first).
template <class Mask>
HWY_INLINE KeyVector compress_indices([[maybe_unused]] KeyVector index, [[maybe_unused]] KeyVector first,
                                      [[maybe_unused]] Mask mask, [[maybe_unused]] std::uint32_t bits) {
#if HWY_TARGET == HWY_AVX2
  return hn::Add(set_lanes(bits), first);
#else
  return hn::Compress(index, mask);
#endif
}

struct VectorPasses {
  static constexpr const char* name = simd_target();
  static constexpr std::int64_t sampled_row = 64, short_row = 64;
  static constexpr std::int64_t short_sample = 64, long_sample = 128, long_row = 65536;
  static constexpr double spread = 2.0, open_share = 0.1;
  static constexpr std::int64_t slack = 64;

  template <KeyForm form, class Bits>
  static void collect(const Bits* HWY_RESTRICT bits, std::int64_t n, KeyRange range, std::int32_t* HWY_RESTRICT out,
                      Collected& found) {
    if (range.hi == no_bound) collect_run<form, true>(bits, n, range, out, found);
    else collect_run<form, false>(bits, n, range, out, found);
  }

  // open: nothing lies above the range, so one comparison tells.
  template <KeyForm form, bool open, class Bits>
  static HWY_NOINLINE void collect_run(const Bits* HWY_RESTRICT bits, std::int64_t n, KeyRange range,
                                       std::int32_t* HWY_RESTRICT out, Collected& found) {
    const KeyTag d;
    constexpr std::int32_t most = std::numeric_limits<Bits>::max();
    const KeyVector mask = hn::Set(d, most), hi = hn::Set(d, range.hi), below = hn::Set(d, range.lo - 1);
    KeyVector largest = hn::Zero(d);
    std::int64_t inside = found.inside, from = 0, i = 0;
    const std::int64_t before = inside;
    const auto step = [&](const Bits* p) HWY_ATTR {
      const KeyVector b = load_bits(p), key = key_in_form<form>(b, mask);
      largest = hn::Max(largest, hn::And(b, mask));
      auto in = hn::Gt(key, below);
      if constexpr (!open) {
        from += std::popcount(lane_bits(in));
        in = hn::AndNot(hn::Gt(key, hi), in);
      }
      const std::uint32_t in_bits = lane_bits(in);
      hn::StoreU(compress(key, in, in_bits), d, out + inside);
      inside += std::popcount(in_bits);
    };
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      step(bits + i);
      step(bits + i + lanes);
      step(bits + i + 2 * lanes);
      step(bits + i + 3 * lanes);
    }
    for (; i + lanes <= n; i += lanes) step(bits + i);
    if constexpr (!open) found.above += from - (inside - before);
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
      const std::uint32_t in_bits = lane_bits(in);
      hn::StoreU(compress(key, in, in_bits), d, keys + kept);
      kept += std::popcount(in_bits);
    }
    for (; i < n; ++i) {
      const std::int32_t key = keys[i];
      keys[kept] = key;
      kept += (key >= range.lo) & (key <= range.hi);
    }
    return kept;
  }

  // above[i] = keys greater than keys[i], for i up to the next multiple of `lanes`.
  static HWY_INLINE void count_greater(const std::int32_t* keys, std::int64_t n, std::int32_t* above) {
    std::int64_t first = 0;
    for (; first + 3 * lanes < n; first += 4 * lanes) count_greater_block<4>(keys, n, first, above);
    for (; first < n; first += lanes) count_greater_block<1>(keys, n, first, above);
  }

  template <int vectors>
  static HWY_INLINE void count_greater_block(const std::int32_t* keys, std::int64_t n, std::int64_t first,
                                             std::int32_t* above) {
    const KeyTag d;
    [[maybe_unused]] const KeyVector one = hn::Set(d, 1);
    KeyVector key[vectors], count[vectors];
    for (int v = 0; v < vectors; ++v) {
      key[v] = hn::LoadU(d, keys + first + v * lanes);
      count[v] = hn::Zero(d);
    }
    for (std::int64_t j = 0; j < n; ++j) {
      const KeyVector other = hn::Set(d, keys[j]);
      for (int v = 0; v < vectors; ++v) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
        count[v] = hn::IfThenElse(hn::Gt(other, key[v]), hn::Add(count[v], one), count[v]);
#else
        count[v] = hn::Sub(count[v], hn::VecFromMask(d, hn::Gt(other, key[v])));
#endif
      }
    }
    for (int v = 0; v < vectors; ++v) hn::StoreU(count[v], d, above + first + v * lanes);
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

  // n: a multiple of 64, at most long_sample.
  static KeyRange order_statistics(std::int32_t* keys, std::int64_t n, std::int64_t first, std::int64_t last) {
    HWY_ALIGN std::int32_t above[long_sample];
    count_greater(keys, n, above);
    return {key_at(keys, above, n, last), key_at(keys, above, n, first)};
  }

  // n <= short_row; keys holds slack behind.
  static HWY_NOINLINE KthKey kth(std::int32_t* keys, std::int64_t n, std::int64_t k) {
    HWY_ALIGN std::int32_t above[short_row + 4 * lanes];
    std::fill_n(keys + n, 4 * lanes, std::numeric_limits<std::int32_t>::min());  // below every key
    count_greater(keys, n, above);
    const std::int32_t key = key_at(keys, above, n, k - 1);
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
  static HWY_NOINLINE std::int64_t behind_equal(const Bits* bits, std::int64_t n, std::int32_t key,
                                                std::int64_t count) {
    const KeyTag d;
    const KeyVector mask = hn::Set(d, std::int32_t{std::numeric_limits<Bits>::max()}), wanted = hn::Set(d, key);
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      const auto found = hn::CountTrue(d, hn::Eq(key_in_form<form>(load_bits(bits + i), mask), wanted));
      if (static_cast<std::int64_t>(found) >= count) break;
      count -= static_cast<std::int64_t>(found);
    }
    return i + PortablePasses::behind_equal<form>(bits + i, n - i, key, count);
  }

  template <KeyForm form, class Bits>
  static HWY_NOINLINE std::int64_t emit(const Bits* HWY_RESTRICT bits, std::int64_t n, std::int32_t bound, index_t base,
                                        index_t* HWY_RESTRICT out, std::int64_t room) {
#if KVEVICT_EMIT_AVX512
    return avx512::emit<form>(bits, n, bound, base, out, room);
#else
    const KeyTag d;
    const KeyVector mask = hn::Set(d, std::int32_t{std::numeric_limits<Bits>::max()}), limit = hn::Set(d, bound);
    const KeyVector step = hn::Set(d, static_cast<std::int32_t>(lanes));
    KeyVector first = hn::Set(d, base), index = hn::Iota(d, base);
    std::int64_t taken = 0, i = 0;
    for (; i + lanes <= n && taken < room; i += lanes) {
      const auto take = hn::Gt(key_in_form<form>(load_bits(bits + i), mask), limit);
      const std::uint32_t take_bits = lane_bits(take);
      const KeyVector front = compress_indices(index, first, take, take_bits);
      std::int64_t count = std::popcount(take_bits);
      if (taken + lanes <= room) {
        hn::StoreU(front, d, out + taken);
      } else {  // a full vector no longer fits
        count = std::min(count, room - taken);
        hn::BlendedStore(front, hn::FirstN(d, static_cast<std::size_t>(count)), d, out + taken);
      }
      taken += count;
      first = hn::Add(first, step);
      index = hn::Add(index, step);
    }
    return taken + PortablePasses::emit<form>(bits + i, n - i, bound, base + static_cast<index_t>(i), out + taken,
                                              room - taken);
#endif
  }
};

}  // namespace HWY_NAMESPACE
using SimdPasses = HWY_NAMESPACE::VectorPasses;
}  // namespace kvevict::inline KVEVICT_ABI::detail
HWY_AFTER_NAMESPACE();
#endif
