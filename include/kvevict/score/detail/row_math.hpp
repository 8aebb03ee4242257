// Sums over one row. Partial sums go to a fixed number of lanes, so that compilers vectorise them and every number of
// threads gives the same bits.
#pragma once
#include <concepts>
#include <cstdint>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// to_float() without branches, so that loops over it vectorise: the exponent is moved by a product, which is exact and
// turns subnormals into ordinary numbers; infinities and NaN get theirs back.
inline float widen(float x) noexcept { return x; }
inline float widen(bf16_t x) noexcept { return to_float(x); }
inline float widen(fp16_t x) noexcept {
  const std::uint32_t bits = x.bits, magnitude = bits & 0x7fffu;
  const std::uint32_t scaled = bits_of(float_of(magnitude << 13) * 0x1p112f);
  return float_of(scaled | (magnitude >= 0x7c00u ? 0x7f800000u : 0u) | (bits & 0x8000u) << 16);
}

// Row r as floats [cols]: in place where it lies so, else widened into `buffer`.
template <class T>
const float* float_row(const Rows<const T>& rows, std::int64_t r, float* __restrict buffer) {
  const T* __restrict row = rows.row(r);
  if constexpr (std::same_as<T, float>)
    if (rows.col_stride == 1) return row;
  if (rows.col_stride == 1)
    for (index_t c = 0; c < rows.cols; ++c) buffer[c] = widen(row[c]);
  else
    for (index_t c = 0; c < rows.cols; ++c) buffer[c] = widen(row[c * rows.col_stride]);
  return buffer;
}

// Sum of a[i] * b[i] in Sum (float or double) of `Lanes` partial sums.
template <class Sum, index_t Lanes, class A, class B>
Sum lane_dot(const A* a, const B* b, index_t n) {
  Sum lanes[Lanes] = {};
  index_t i = 0;
  for (; i + Lanes <= n; i += Lanes)
    for (index_t l = 0; l < Lanes; ++l) lanes[l] += static_cast<Sum>(a[i + l]) * static_cast<Sum>(b[i + l]);
  for (index_t l = 0; i < n; ++i, ++l) lanes[l] += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
  for (index_t half = Lanes / 2; half > 0; half /= 2)
    for (index_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}
inline float dot(const float* a, const float* b, index_t n) { return lane_dot<float, 16>(a, b, n); }
inline double dot_double(const float* a, const float* b, index_t n) { return lane_dot<double, 8>(a, b, n); }

}  // namespace kvevict::inline KVEVICT_ABI::detail
