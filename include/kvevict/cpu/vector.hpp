// The vector layer: what the kernels of this library are written in. Through Highway where cpu/simd.hpp finds it, so
// that `width` and the machine's instructions follow from the target, and through the compiler's own vectors of 8
// floats otherwise. Kernels take both for granted: they never ask which one they got.
//
// Two exponentials, for whose bits scores answer: exp2 for the softmax of windows, exp for networks and the decoder.
// Top-k (cpu/detail/topk_passes_simd.hpp, topk_emit_avx512.hpp) and the copying of rows (cache/compact_rows.hpp) work
// on masks, compressed stores and integers of many widths, which this layer does not have: they call Highway, or the
// processor, themselves.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/simd.hpp"

namespace kvevict::inline KVEVICT_ABI::simd {

#if KVEVICT_SIMD

namespace hn = hwy::HWY_NAMESPACE;
using F = hn::ScalableTag<float>;
using Vec = hn::Vec<F>;
inline constexpr std::size_t width = hn::MaxLanes(F{});
inline constexpr int registers = width >= 16 || HWY_ARCH_ARM ? 32 : 16;  // that hold a vector each

HWY_INLINE Vec zero() { return hn::Zero(F{}); }
HWY_INLINE Vec set(float x) { return hn::Set(F{}, x); }
HWY_INLINE Vec load(const float* p) { return hn::LoadU(F{}, p); }
HWY_INLINE void store(Vec v, float* p) { hn::StoreU(v, F{}, p); }
// Past the caches; p on a multiple of the vector's size. end_stream() before anybody else looks.
HWY_INLINE void stream(Vec v, float* p) { hn::Stream(v, F{}, p); }
HWY_INLINE void end_stream() { hwy::FlushStream(); }

HWY_INLINE Vec widen(const float* p) { return load(p); }
HWY_INLINE Vec widen(const fp16_t* p) {
  const hn::Rebind<std::uint16_t, F> bits;
  const hn::Rebind<hwy::float16_t, F> half;
  return hn::PromoteTo(F{}, hn::BitCast(half, hn::LoadU(bits, &p->bits)));
}
HWY_INLINE Vec widen(const bf16_t* p) {
  const hn::Rebind<std::uint16_t, F> bits;
  const hn::RebindToUnsigned<F> wide;
  return hn::BitCast(F{}, hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(bits, &p->bits))));
}

HWY_INLINE Vec neg(Vec a) { return hn::Neg(a); }
HWY_INLINE Vec add(Vec a, Vec b) { return hn::Add(a, b); }
HWY_INLINE Vec sub(Vec a, Vec b) { return hn::Sub(a, b); }
HWY_INLINE Vec mul(Vec a, Vec b) { return hn::Mul(a, b); }
HWY_INLINE Vec div(Vec a, Vec b) { return hn::Div(a, b); }
HWY_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return hn::MulAdd(a, b, c); }         // a b + c
HWY_INLINE Vec neg_mul_add(Vec a, Vec b, Vec c) { return hn::NegMulAdd(a, b, c); }  // c - a b
HWY_INLINE Vec max(Vec a, Vec b) { return hn::Max(a, b); }                          // a NaN in b stays
HWY_INLINE Vec min(Vec a, Vec b) { return hn::Min(a, b); }                          // likewise
// a > b ? x : y
HWY_INLINE Vec if_greater(Vec a, Vec b, Vec x, Vec y) { return hn::IfThenElse(hn::Gt(a, b), x, y); }
HWY_INLINE float first(Vec v) { return hn::GetLane(v); }
HWY_INLINE float sum(Vec v) { return hn::GetLane(hn::SumOfLanes(F{}, v)); }
HWY_INLINE float max_of(Vec v) { return hn::GetLane(hn::MaxOfLanes(F{}, v)); }

namespace bits {
HWY_INLINE Vec round(Vec v) { return hn::Round(v); }
// The lowest bits of v moved into the exponent.
HWY_INLINE Vec to_exponent(Vec v) {
  const hn::RebindToSigned<F> di;
  return hn::BitCast(F{}, hn::ShiftLeft<23>(hn::BitCast(di, v)));
}
// 2^n for whole numbers n from -126 to 128, which gives infinity.
HWY_INLINE Vec power_of_two(Vec n) {
  const hn::RebindToSigned<F> di;
  return hn::BitCast(F{}, hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127))));
}
}  // namespace bits

#else

inline constexpr std::size_t width = 8;
#if defined(__AVX__)
inline constexpr int registers = 16;
#else
inline constexpr int registers = 8;  // a vector takes two of the machine's
#endif
// Of the machine's vectors: compilers split wider ones badly, and warn where they are passed.
using Part = float __attribute__((vector_size(32 * registers / 16)));
using IntPart = std::int32_t __attribute__((vector_size(32 * registers / 16)));
inline constexpr std::size_t part_width = sizeof(Part) / sizeof(float), parts = width / part_width;
struct Vec {
  Part part[parts];
};

// op(k) for part k of the result.
template <class Op>
[[gnu::always_inline]] inline Vec each(Op op) {
  Vec out;
  for (std::size_t k = 0; k < parts; ++k) out.part[k] = op(k);
  return out;
}
[[gnu::always_inline]] inline float lane(const Vec& v, std::size_t i) { return v.part[i / part_width][i % part_width]; }

inline Vec set(float x) {
  return each([&](std::size_t) { return x - Part{}; });
}
inline Vec zero() { return set(0.f); }
inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(const Vec& v, float* p) { __builtin_memcpy(p, &v, sizeof v); }
inline void stream(const Vec& v, float* p) { store(v, p); }
inline void end_stream() {}
template <class T>
inline Vec widen(const T* p) {
  float wide[width];
  for (std::size_t i = 0; i < width; ++i) wide[i] = to_float(p[i]);
  return load(wide);
}
inline Vec neg(const Vec& a) {
  return each([&](std::size_t k) { return -a.part[k]; });
}
inline Vec add(const Vec& a, const Vec& b) {
  return each([&](std::size_t k) { return a.part[k] + b.part[k]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return each([&](std::size_t k) { return a.part[k] - b.part[k]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return each([&](std::size_t k) { return a.part[k] * b.part[k]; });
}
inline Vec div(const Vec& a, const Vec& b) {
  return each([&](std::size_t k) { return a.part[k] / b.part[k]; });
}
inline Vec mul_add(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](std::size_t k) { return a.part[k] * b.part[k] + c.part[k]; });
}
inline Vec neg_mul_add(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](std::size_t k) { return c.part[k] - a.part[k] * b.part[k]; });
}
inline Vec if_greater(const Vec& a, const Vec& b, const Vec& x, const Vec& y) {
  return each([&](std::size_t k) { return a.part[k] > b.part[k] ? x.part[k] : y.part[k]; });
}
inline Vec max(const Vec& a, const Vec& b) { return if_greater(a, b, a, b); }
inline Vec min(const Vec& a, const Vec& b) { return if_greater(b, a, a, b); }
inline float first(const Vec& v) { return lane(v, 0); }
inline float sum(const Vec& v) {
  return ((lane(v, 0) + lane(v, 4)) + (lane(v, 2) + lane(v, 6))) +
         ((lane(v, 1) + lane(v, 5)) + (lane(v, 3) + lane(v, 7)));
}
inline float max_of(const Vec& v) {
  float m = lane(v, 0);
  for (std::size_t i = 1; i < width; ++i) m = lane(v, i) > m ? lane(v, i) : m;
  return m;
}

namespace bits {
inline Vec round(const Vec& v) {  // exact below 2^22: then no bits are left for a fraction
  return sub(add(v, set(0x1.8p23f)), set(0x1.8p23f));
}
inline Vec to_exponent(const Vec& v) {
  return each([&](std::size_t k) { return __builtin_bit_cast(Part, __builtin_bit_cast(IntPart, v.part[k]) << 23); });
}
inline Vec power_of_two(const Vec& n) {
  return each([&](std::size_t k) {
    return __builtin_bit_cast(Part, (__builtin_convertvector(n.part[k], IntPart) + 127) << 23);
  });
}
}  // namespace bits

#endif

// 2^x, relative error below 1e-7; 0 below 2^-126 (no denormals), at most 2^126; NaN stays NaN.
[[gnu::always_inline]] inline Vec exp2(Vec x) {
  // Added to a small float32 this leaves no bits for a fraction: rounds to the nearest integer, + 127 in the lowest
  // bits.
  const Vec shift = set(0x1.8p23f + 127);
  x = min(set(126.f), max(set(-127.f), x));
  const Vec shifted = add(x, shift);
  const Vec f = sub(x, sub(shifted, shift));
  // 2^f for f in [-1/2, 1/2]: Chebyshev interpolation of (2^f - 1) / f, relative error 5e-9 before rounding.
  Vec p = set(1.5453163e-4f);
  p = mul_add(p, f, set(1.3390863e-3f));
  p = mul_add(p, f, set(9.6180826e-3f));
  p = mul_add(p, f, set(5.5503571e-2f));
  p = mul_add(p, f, set(2.4022651e-1f));
  p = mul_add(p, f, set(6.9314719e-1f));
  p = mul_add(p, f, set(1.f));
  return mul(p, bits::to_exponent(shifted));
}

// e^x, relative error below 2.5e-7 in [-87, 88]; 0 below, infinity from 88.8 on; NaN stays NaN.
[[gnu::always_inline]] inline Vec exp(Vec x) {
  const Vec t = min(set(89.f), max(set(-87.f), x));
  const Vec n = bits::round(mul(t, set(1.44269504f)));
  Vec r = neg_mul_add(n, set(0.693359375f), t);  // t - n ln 2, in two pieces
  r = neg_mul_add(n, set(-2.12194440e-4f), r);
  Vec p = set(1.f / 720);
  p = mul_add(p, r, set(1.f / 120));
  p = mul_add(p, r, set(1.f / 24));
  p = mul_add(p, r, set(1.f / 6));
  p = mul_add(p, r, set(0.5f));
  p = mul_add(p, r, set(1.f));
  p = mul_add(p, r, set(1.f));
  return if_greater(set(-87.f), x, zero(), mul(p, bits::power_of_two(n)));
}

// x / (1 + e^-x): -0 far below 0, NaN at -infinity.
[[gnu::always_inline]] inline Vec silu(Vec x) { return div(x, add(exp(neg(x)), set(1.f))); }

// One row of a cache as floats: out [cols] from elements `stride` apart.
template <CacheElement T>
void widen_row(const T* __restrict row, std::int64_t stride, index_t cols, float* __restrict out) {
  index_t c = 0;
  if (stride == 1)
    for (constexpr auto lanes = static_cast<index_t>(width); c + lanes <= cols; c += lanes)
      store(widen(row + c), out + c);
  for (; c < cols; ++c) out[c] = to_float(row[c * stride]);
}

#if KVEVICT_SIMD
namespace bits {
// Swaps the blocks beside the diagonal of a 2s x 2s block of a matrix of rows a (row i) and b (row i + s).
template <int s, std::size_t... I>
HWY_INLINE void swap_blocks(Vec& a, Vec& b, std::index_sequence<I...>) {
  constexpr int lanes = static_cast<int>(width);
  const auto x = a.raw, y = b.raw;
  a = Vec{__builtin_shufflevector(x, y, ((I & s) ? lanes + static_cast<int>(I) - s : static_cast<int>(I))...)};
  b = Vec{__builtin_shufflevector(x, y, ((I & s) ? lanes + static_cast<int>(I) : static_cast<int>(I) + s)...)};
}
}  // namespace bits

// Transposes the square matrix of these rows, in registers.
template <int s = static_cast<int>(width) / 2>
HWY_INLINE void transpose(Vec (&rows)[width]) {
#pragma GCC unroll 16
  for (std::size_t i = 0; i < width; ++i)
    if ((i & s) == 0) bits::swap_blocks<s>(rows[i], rows[i + s], std::make_index_sequence<width>{});
  if constexpr (s > 1) transpose<s / 2>(rows);
}
#else
inline void transpose(Vec (&rows)[width]) {
  float square[width][width];
  for (std::size_t r = 0; r < width; ++r)
    for (std::size_t c = 0; c < width; ++c) square[c][r] = lane(rows[r], c);
  for (std::size_t r = 0; r < width; ++r) rows[r] = load(square[r]);
}
#endif

}  // namespace kvevict::inline KVEVICT_ABI::simd
