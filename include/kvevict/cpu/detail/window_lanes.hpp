// The few vector operations that the window attention kernel is written in: Highway where core/simd.hpp finds it,
// arrays of 8 floats (left to the compiler) otherwise. Not a general vector library.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/simd.hpp"
#if KVEVICT_SIMD
#include <hwy/cache_control.h>
#endif

namespace kvevict::inline KVEVICT_ABI::detail::lanes {

// 2^f for f in [-1/2, 1/2]: Chebyshev interpolation of (2^f - 1) / f, relative error 5e-9 before rounding.
inline constexpr float exp2_terms[] = {
    1.5453163e-4f, 1.3390863e-3f, 9.6180826e-3f, 5.5503571e-2f, 2.4022651e-1f, 6.9314719e-1f, 1.f};
// Added to a small float32 it leaves no bits for a fraction: rounds to the nearest integer.
inline constexpr float exp2_shift = 0x1.8p23f + 127;

#if KVEVICT_SIMD

namespace hn = hwy::HWY_NAMESPACE;
using F = hn::ScalableTag<float>;
using Vec = hn::Vec<F>;
inline constexpr std::size_t width = hn::MaxLanes(F{});

HWY_INLINE Vec zero() { return hn::Zero(F{}); }
HWY_INLINE Vec set(float x) { return hn::Set(F{}, x); }
HWY_INLINE Vec load(const float* p) { return hn::LoadU(F{}, p); }
HWY_INLINE void store(Vec v, float* p) { hn::StoreU(v, F{}, p); }
HWY_INLINE void stream(Vec v, float* p) { hn::Stream(v, F{}, p); }  // p on a multiple of the vector's size
HWY_INLINE void end_stream() { hwy::FlushStream(); }
HWY_INLINE Vec add(Vec a, Vec b) { return hn::Add(a, b); }
HWY_INLINE Vec sub(Vec a, Vec b) { return hn::Sub(a, b); }
HWY_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return hn::MulAdd(a, b, c); }
HWY_INLINE Vec max(Vec a, Vec b) { return hn::Max(a, b); }
HWY_INLINE float sum(Vec v) { return hn::GetLane(hn::SumOfLanes(F{}, v)); }
// x where limit > at, -inf elsewhere.
HWY_INLINE Vec visible(Vec x, Vec limit, Vec at, Vec hidden) { return hn::IfThenElse(hn::Gt(limit, at), x, hidden); }

// 2^x, relative error below 1e-7; 0 below 2^-126 (no denormals), at most 2^126; NaN stays NaN.
HWY_INLINE Vec exp2(Vec x) {
  const F d;
  const hn::RebindToSigned<F> di;
  x = hn::Min(hn::Set(d, 126.f), hn::Max(hn::Set(d, -127.f), x));  // the constant first: x86 then keeps a NaN
  const Vec shifted = hn::Add(x, hn::Set(d, exp2_shift));          // its lowest bits are the nearest integer + 127
  const Vec f = hn::Sub(x, hn::Sub(shifted, hn::Set(d, exp2_shift)));
  Vec p = hn::Set(d, exp2_terms[0]);
  p = hn::MulAdd(p, f, hn::Set(d, exp2_terms[1]));
  p = hn::MulAdd(p, f, hn::Set(d, exp2_terms[2]));
  p = hn::MulAdd(p, f, hn::Set(d, exp2_terms[3]));
  p = hn::MulAdd(p, f, hn::Set(d, exp2_terms[4]));
  p = hn::MulAdd(p, f, hn::Set(d, exp2_terms[5]));
  p = hn::MulAdd(p, f, hn::Set(d, exp2_terms[6]));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

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

// Keys and vectors of query rows whose products are held in registers at a time: 24 of 32, or 12 of 16.
inline constexpr int block_keys = width >= 16 || HWY_ARCH_ARM ? 12 : 6;

#else

inline constexpr std::size_t width = 8;
struct Vec {
  float v[width];
};

template <class Op>
inline Vec each(Op op) {
  Vec out;
  for (std::size_t i = 0; i < width; ++i) out.v[i] = op(i);
  return out;
}
inline Vec zero() { return {}; }
inline Vec set(float x) {
  return each([&](std::size_t) { return x; });
}
inline Vec load(const float* p) {
  return each([&](std::size_t i) { return p[i]; });
}
inline void store(const Vec& v, float* p) {
  for (std::size_t i = 0; i < width; ++i) p[i] = v.v[i];
}
inline void stream(const Vec& v, float* p) { store(v, p); }
inline void end_stream() {}
inline Vec add(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.v[i] + b.v[i]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.v[i] - b.v[i]; });
}
inline Vec mul_add(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](std::size_t i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec max(const Vec& a, const Vec& b) {
  return each([&](std::size_t i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline float sum(const Vec& v) {
  return ((v.v[0] + v.v[4]) + (v.v[2] + v.v[6])) + ((v.v[1] + v.v[5]) + (v.v[3] + v.v[7]));
}
inline Vec visible(const Vec& x, const Vec& limit, const Vec& at, const Vec& hidden) {
  return each([&](std::size_t i) { return limit.v[i] > at.v[i] ? x.v[i] : hidden.v[i]; });
}
inline Vec exp2(const Vec& x) {
  return each([&](std::size_t i) {
    const float in = x.v[i] < -127.f ? -127.f : x.v[i] > 126.f ? 126.f : x.v[i];
    const float shifted = in + exp2_shift, f = in - (shifted - exp2_shift);
    float p = exp2_terms[0];
    for (int k = 1; k < 7; ++k) p = p * f + exp2_terms[k];
    return p * float_of(bits_of(shifted) << 23);
  });
}
template <class T>
inline Vec widen(const T* p) {
  return each([&](std::size_t i) { return to_float(p[i]); });
}
inline constexpr int block_keys = 3;

#endif

}  // namespace kvevict::inline KVEVICT_ABI::detail::lanes
