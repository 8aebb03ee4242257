// The inner loop of LKV-T: scores of a block of inputs by one head's network, fused so that hidden values never leave
// the registers. Rows of W1 are vectors over hidden units, inputs are broadcast, a tile of input rows shares each load
// of weights; the activation and the product with w2 run on the accumulators. Inputs need no transposition.
// Through Highway where it is found (cpu/simd.hpp), by plain loops otherwise.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/lkv/silu.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Rows that share a load of weights; blocks of inputs are a multiple of it.
#if KVEVICT_SIMD && (HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM)
inline constexpr index_t token_tile = 8;  // 16 accumulators of 32 registers
#else
inline constexpr index_t token_tile = 6;  // 12 of 16
#endif

#if KVEVICT_SIMD

namespace simd_tokens {
namespace hn = hwy::HWY_NAMESPACE;
using F = hn::ScalableTag<float>;
using Vec = hn::Vec<F>;

// x / (1 + e^-x). The exponential is 2^n times a polynomial of degree 6, relative error below 1.2e-7 (measured over
// [-87, 88], where it is clamped).
HWY_INLINE Vec silu(F d, Vec x) {
  const hn::RebindToSigned<F> di;
  const Vec t = hn::Min(hn::Max(hn::Neg(x), hn::Set(d, -87.f)), hn::Set(d, 88.f));
  const Vec n = hn::Round(hn::Mul(t, hn::Set(d, 1.44269504f)));
  Vec r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), t);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  Vec p = hn::Set(d, 1.f / 720);
  p = hn::MulAdd(p, r, hn::Set(d, 1.f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  const Vec e = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::Div(x, hn::Add(e, hn::Set(d, 1.f)));
}

// Adds to acc [token_tile vectors, one a row] what V vectors of hidden units contribute. x: [token_tile][inputs];
// w: [inputs][V vectors]; b1, w2: [V vectors].
template <std::size_t V>
HWY_INLINE void tile(const float* HWY_RESTRICT x, std::size_t inputs, const float* HWY_RESTRICT w,
                     const float* HWY_RESTRICT b1, const float* HWY_RESTRICT w2, float* HWY_RESTRICT acc) {
  const F d;
  constexpr std::size_t lanes = hn::MaxLanes(F{});
  constexpr std::size_t rows = token_tile;
  Vec c[rows][V];
  for (std::size_t q = 0; q < V; ++q)
    for (std::size_t i = 0; i < rows; ++i) c[i][q] = hn::LoadU(d, b1 + q * lanes);
  for (std::size_t k = 0; k < inputs; ++k) {
    Vec b[V];
    for (std::size_t q = 0; q < V; ++q) b[q] = hn::LoadU(d, w + (k * V + q) * lanes);
    for (std::size_t i = 0; i < rows; ++i) {
      const Vec a = hn::Set(d, x[i * inputs + k]);
      for (std::size_t q = 0; q < V; ++q) c[i][q] = hn::MulAdd(a, b[q], c[i][q]);
    }
  }
  for (std::size_t i = 0; i < rows; ++i) {
    float* sum = acc + i * lanes;
    Vec s = hn::LoadU(d, sum);
    for (std::size_t q = 0; q < V; ++q) s = hn::MulAdd(silu(d, c[i][q]), hn::LoadU(d, w2 + q * lanes), s);
    hn::StoreU(s, d, sum);
  }
}

// Vectors of hidden units per slab. Two share each broadcast input; three or four were slower on Zen 4, where the
// compiler then keeps accumulators in memory.
constexpr std::size_t slab_vectors(index_t hidden) noexcept {
  return static_cast<std::size_t>(hidden) <= hn::MaxLanes(F{}) ? 1 : 2;
}
constexpr std::size_t slab_width(index_t hidden) noexcept { return slab_vectors(hidden) * hn::MaxLanes(F{}); }

template <std::size_t V>
void scores(const float* x, std::size_t count, std::size_t inputs, std::size_t slabs, const float* packed, float* acc,
            float* out) {
  constexpr std::size_t lanes = hn::MaxLanes(F{}), width = V * lanes;
  const std::size_t slab = (inputs + 2) * width;
  const F d;
  std::fill(acc, acc + count * lanes, 0.f);
  for (std::size_t s = 0; s < slabs; ++s) {
    const float* w = packed + s * slab;
    for (std::size_t t = 0; t < count; t += token_tile)
      tile<V>(x + t * inputs, inputs, w, w + inputs * width, w + (inputs + 1) * width, acc + t * lanes);
  }
  for (std::size_t t = 0; t < count; ++t) out[t] = hn::GetLane(hn::SumOfLanes(d, hn::LoadU(d, acc + t * lanes)));
}
}  // namespace simd_tokens

// Weights as the kernel wants them: slabs of hidden units, each [inputs rows of W1, b1, w2], padded with zeros.
inline std::size_t packed_weights_floats(index_t inputs, index_t hidden) noexcept {
  const std::size_t width = simd_tokens::slab_width(hidden);
  return (static_cast<std::size_t>(hidden) + width - 1) / width * width * (static_cast<std::size_t>(inputs) + 2);
}
inline void pack_weights(const TokenNet<const float>& net, float* packed) {
  const auto width = static_cast<index_t>(simd_tokens::slab_width(net.hidden));
  for (index_t first = 0; first < net.hidden; first += width) {
    const auto used = static_cast<std::size_t>(std::min(width, net.hidden - first));
    for (index_t r = 0; r < net.inputs + 2; ++r, packed += width) {
      const float* from = r < net.inputs ? net.w1 + std::int64_t{r} * net.hidden : r == net.inputs ? net.b1 : net.w2;
      std::memcpy(packed, from + first, used * sizeof(float));
      std::fill(packed + used, packed + width, 0.f);
    }
  }
}
// Floats of working memory for a block of `count` rows.
inline std::size_t token_kernel_floats(index_t count, index_t) noexcept {
  return static_cast<std::size_t>(count) * hwy::HWY_NAMESPACE::MaxLanes(simd_tokens::F{});
}

// out: [count], count a multiple of token_tile. x: [count][inputs].
inline void token_block_scores(const TokenNet<const float>& net, const float* packed, const float* x, index_t count,
                               float* work, float* out) {
  const std::size_t width = simd_tokens::slab_width(net.hidden);
  const auto inputs = static_cast<std::size_t>(net.inputs), rows = static_cast<std::size_t>(count);
  const std::size_t slabs = (static_cast<std::size_t>(net.hidden) + width - 1) / width;
  if (simd_tokens::slab_vectors(net.hidden) == 1) simd_tokens::scores<1>(x, rows, inputs, slabs, packed, work, out);
  else simd_tokens::scores<2>(x, rows, inputs, slabs, packed, work, out);
}

#else  // KVEVICT_SIMD

inline std::size_t packed_weights_floats(index_t, index_t) noexcept { return 0; }
inline void pack_weights(const TokenNet<const float>&, float*) {}
inline std::size_t token_kernel_floats(index_t, index_t hidden) noexcept { return static_cast<std::size_t>(hidden); }
inline void token_block_scores(const TokenNet<const float>& net, const float*, const float* x, index_t count,
                               float* work, float* out) {
  const auto units = static_cast<std::size_t>(net.hidden);
  for (index_t r = 0; r < count; ++r, x += net.inputs) {
    std::copy_n(net.b1, units, work);
    for (index_t i = 0; i < net.inputs; ++i) {
      const float* const row = net.w1 + std::int64_t{i} * net.hidden;
      for (std::size_t j = 0; j < units; ++j) work[j] += x[i] * row[j];
    }
    float sum = 0.f;
    for (std::size_t j = 0; j < units; ++j) sum += silu(work[j]) * net.w2[j];
    out[r] = sum;
  }
}

#endif  // KVEVICT_SIMD

}  // namespace kvevict::inline KVEVICT_ABI::detail
