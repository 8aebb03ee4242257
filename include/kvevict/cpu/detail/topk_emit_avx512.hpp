// Writing indices with AVX-512 VBMI2: the comparisons of 64 entries become one mask, one byte compression turns it into
// positions, and only as many vectors of indices are stored as there are positions to hold. Highway has no such
// compression for the processors that have it; against its 32-bit one this halves the time of the pass.
#pragma once
#include "kvevict/cpu/simd.hpp"

#if KVEVICT_SIMD && defined(__AVX512VBMI2__) && defined(__AVX512BW__) && defined(__BMI2__)
#define KVEVICT_EMIT_AVX512 1
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/topk_passes.hpp"

namespace kvevict::inline KVEVICT_ABI::detail::avx512 {

// Which of the 64 entries at p (the `live` ones of them) have a key above the bound.
template <KeyForm form>
inline std::uint64_t above_mask(const std::int32_t* p, std::int32_t bound, std::uint64_t live) {
  const __m512i limit = _mm512_set1_epi32(bound), magnitude = _mm512_set1_epi32(0x7fffffff);
  std::uint64_t mask = 0;
  for (int q = 0; q < 4; ++q) {
    const auto lanes = static_cast<__mmask16>(live >> (16 * q));
    __m512i key = _mm512_maskz_loadu_epi32(lanes, p + 16 * q);
    if constexpr (form == KeyForm::negative) {
      key = _mm512_xor_si512(key, magnitude);
    } else if constexpr (form == KeyForm::any) {
      const __m512i sign = _mm512_srai_epi32(key, 31);
      key = _mm512_sub_epi32(_mm512_xor_si512(_mm512_and_si512(key, magnitude), sign), sign);
    }
    mask |= std::uint64_t{_mm512_mask_cmpgt_epi32_mask(lanes, key, limit)} << (16 * q);
  }
  return mask;
}

template <KeyForm form>
inline std::uint64_t above_mask(const std::int16_t* p, std::int32_t bound, std::uint64_t live) {
  // A bound beyond 16 bits (one below the least key) is still below every key.
  const auto narrow = static_cast<std::int16_t>(std::max<std::int32_t>(bound, -0x8000));
  const __m512i limit = _mm512_set1_epi16(narrow), magnitude = _mm512_set1_epi16(0x7fff);
  std::uint64_t mask = 0;
  for (int q = 0; q < 2; ++q) {
    const auto lanes = static_cast<__mmask32>(live >> (32 * q));
    __m512i key = _mm512_maskz_loadu_epi16(lanes, p + 32 * q);
    if constexpr (form == KeyForm::negative) {
      key = _mm512_xor_si512(key, magnitude);
    } else if constexpr (form == KeyForm::any) {
      const __m512i sign = _mm512_srai_epi16(key, 15);
      key = _mm512_sub_epi16(_mm512_xor_si512(_mm512_and_si512(key, magnitude), sign), sign);
    }
    mask |= std::uint64_t{_mm512_mask_cmpgt_epi16_mask(lanes, key, limit)} << (32 * q);
  }
  return mask;
}

inline constexpr struct Positions {
  alignas(64) std::uint8_t at[64];
  constexpr Positions() : at{} {
    for (std::uint8_t i = 0; i < 64; ++i) at[i] = i;
  }
} positions;

// Vectors of 16 indices; `always` of them are stored whatever their number, which is what the density suggests: a
// branch on the number would be mispredicted.
template <int always, KeyForm form, class Bits>
std::int64_t emit_blocks(const Bits* bits, std::int64_t n, std::int32_t bound, index_t base, index_t* out,
                         std::int64_t room) {
  const __m512i all = _mm512_load_si512(positions.at), step = _mm512_set1_epi32(64);
  __m512i first = _mm512_set1_epi32(base);
  std::int64_t taken = 0, i = 0;
  for (; i + 64 <= n && taken + 64 <= room; i += 64) {
    const std::uint64_t mask = above_mask<form>(bits + i, bound, ~std::uint64_t{0});
    const __m512i packed = _mm512_maskz_compress_epi8(mask, all);
    const int count = std::popcount(mask);
    const auto store = [&](int q, __m128i quarter) {
      _mm512_storeu_si512(out + taken + 16 * q, _mm512_add_epi32(_mm512_cvtepu8_epi32(quarter), first));
    };
    store(0, _mm512_castsi512_si128(packed));
    if (always > 1 || count > 16) store(1, _mm512_extracti32x4_epi32(packed, 1));
    if (always > 2 || count > 32) store(2, _mm512_extracti32x4_epi32(packed, 2));
    if (always > 3 || count > 48) store(3, _mm512_extracti32x4_epi32(packed, 3));
    taken += count;
    first = _mm512_add_epi32(first, step);
  }
  for (; i < n && taken < room; i += 64) {  // the end of the scores or of the room: masked
    const std::uint64_t live = n - i < 64 ? (std::uint64_t{1} << (n - i)) - 1 : ~std::uint64_t{0};
    const std::uint64_t mask = above_mask<form>(bits + i, bound, live);
    const __m512i packed = _mm512_maskz_compress_epi8(mask, all);
    const auto count = static_cast<int>(std::min<std::int64_t>(std::popcount(mask), room - taken));
    const __m128i quarters[4] = {_mm512_castsi512_si128(packed), _mm512_extracti32x4_epi32(packed, 1),
                                 _mm512_extracti32x4_epi32(packed, 2), _mm512_extracti32x4_epi32(packed, 3)};
    for (int q = 0; 16 * q < count; ++q) {
      const auto lanes = static_cast<__mmask16>(_bzhi_u32(0xffffu, static_cast<unsigned>(count - 16 * q)));
      _mm512_mask_storeu_epi32(out + taken + 16 * q, lanes, _mm512_add_epi32(_mm512_cvtepu8_epi32(quarters[q]), first));
    }
    taken += count;
    first = _mm512_add_epi32(first, step);
  }
  return taken;
}

// The emit() of the passes.
template <KeyForm form, class Bits>
std::int64_t emit(const Bits* bits, std::int64_t n, std::int32_t bound, index_t base, index_t* out, std::int64_t room) {
  // Indices per block: mean and two standard deviations of a random choice.
  const double share = n > 0 ? static_cast<double>(room) / static_cast<double>(n) : 0;
  const double expected = 64 * share + 16 * std::sqrt(std::max(0.0, share * (1 - share)));
  if (expected <= 16) return emit_blocks<1, form>(bits, n, bound, base, out, room);
  if (expected <= 32) return emit_blocks<2, form>(bits, n, bound, base, out, room);
  if (expected <= 48) return emit_blocks<3, form>(bits, n, bound, base, out, room);
  return emit_blocks<4, form>(bits, n, bound, base, out, room);
}

}  // namespace kvevict::inline KVEVICT_ABI::detail::avx512
#else
#define KVEVICT_EMIT_AVX512 0
#endif
