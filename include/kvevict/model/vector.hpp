// The widest float vector that this build's instruction set has, as a GCC/Clang vector type: arithmetic operators work
// lane by lane, so that the kernels of model/ are written once for SSE, AVX2, AVX-512 and NEON.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI::kernel {

#if defined(__AVX512F__)
inline constexpr int lanes = 16;
#elif defined(__AVX__)
inline constexpr int lanes = 8;
#else
inline constexpr int lanes = 4;
#endif

using Vec = float __attribute__((vector_size(lanes * 4)));
using IntVec = std::int32_t __attribute__((vector_size(lanes * 4)));

inline Vec load(const float* p) noexcept {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) noexcept { std::memcpy(p, &v, sizeof v); }
inline Vec splat(float x) noexcept { return x - Vec{}; }

// a where the mask is set, b elsewhere. Masks come from comparisons: all bits of a lane are equal.
inline Vec select(IntVec mask, Vec a, Vec b) noexcept {
  return std::bit_cast<Vec>((std::bit_cast<IntVec>(a) & mask) | (std::bit_cast<IntVec>(b) & ~mask));
}
inline Vec maximum(Vec a, Vec b) noexcept { return select(a > b, a, b); }

// Lanes from first to last, so that the result does not depend on how a compiler would reduce.
inline float sum_lanes(Vec v) noexcept {
  float s = 0;
  for (int i = 0; i < lanes; ++i) s += v[i];
  return s;
}
inline float max_lanes(Vec v) noexcept {
  float m = v[0];
  for (int i = 1; i < lanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// Swaps the blocks beside the diagonal of every 2s x 2s block of a matrix of rows a (row i) and b (row i + s).
template <int s, std::size_t... I>
void swap_blocks(Vec& a, Vec& b, std::index_sequence<I...>) noexcept {
  const Vec first = __builtin_shufflevector(a, b, ((I & s) ? lanes + static_cast<int>(I) - s : static_cast<int>(I))...);
  b = __builtin_shufflevector(a, b, ((I & s) ? lanes + static_cast<int>(I) : static_cast<int>(I) + s)...);
  a = first;
}
template <int s = lanes / 2>
void transpose(Vec (&rows)[lanes]) noexcept {
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i)
    if ((i & s) == 0) swap_blocks<s>(rows[i], rows[i + s], std::make_index_sequence<lanes>{});
  if constexpr (s > 1) transpose<s / 2>(rows);
}

// e^x to 2 ulp for x in [-87, 88]; 0 below (also for -inf), the value at 88 above.
inline Vec exp(Vec x) noexcept {
  const IntVec normal = x >= splat(-87.f);
  x = select(x < splat(88.f), x, splat(88.f));
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const Vec magic = splat(12582912.f);
  const Vec shifted = x * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, in two pieces
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const IntVec exponent = (std::bit_cast<IntVec>(shifted) - std::bit_cast<IntVec>(magic) + 127) << 23;
  return std::bit_cast<Vec>(std::bit_cast<IntVec>(p * std::bit_cast<Vec>(exponent)) & normal);
}

}  // namespace kvevict::inline KVEVICT_ABI::kernel
