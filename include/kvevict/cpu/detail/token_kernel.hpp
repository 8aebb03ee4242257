// The inner loop of LKV-T: scores of a block of inputs by one head's network, fused so that hidden values never leave
// the registers. Rows of W1 are vectors over hidden units, inputs are broadcast, a tile of input rows shares each load
// of weights; the activation and the product with w2 run on the accumulators. Inputs need no transposition.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/vector.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Rows that share a load of weights; blocks of inputs are a multiple of it: 16 accumulators of 32 registers, 12 of 16.
inline constexpr index_t token_tile = simd::registers == 32 ? 8 : simd::registers == 16 ? 6 : 2;

// Adds to acc [token_tile vectors, one a row] what V vectors of hidden units contribute. x: [token_tile][inputs];
// w: [inputs][V vectors]; b1, w2: [V vectors].
template <std::size_t V>
[[gnu::always_inline]] inline void add_hidden_units(const float* __restrict x, std::size_t inputs,
                                                    const float* __restrict w, const float* __restrict b1,
                                                    const float* __restrict w2, float* __restrict acc) {
  constexpr std::size_t rows = token_tile;
  simd::Vec c[rows][V];
  for (std::size_t q = 0; q < V; ++q)
    for (std::size_t i = 0; i < rows; ++i) c[i][q] = simd::load(b1 + q * simd::width);
  for (std::size_t k = 0; k < inputs; ++k) {
    simd::Vec b[V];
    for (std::size_t q = 0; q < V; ++q) b[q] = simd::load(w + (k * V + q) * simd::width);
    for (std::size_t i = 0; i < rows; ++i) {
      const simd::Vec a = simd::set(x[i * inputs + k]);
      for (std::size_t q = 0; q < V; ++q) c[i][q] = simd::mul_add(a, b[q], c[i][q]);
    }
  }
  for (std::size_t i = 0; i < rows; ++i) {
    float* sum = acc + i * simd::width;
    simd::Vec s = simd::load(sum);
    for (std::size_t q = 0; q < V; ++q) s = simd::mul_add(simd::silu(c[i][q]), simd::load(w2 + q * simd::width), s);
    simd::store(s, sum);
  }
}

// Vectors of hidden units per slab. Two share each broadcast input; three or four were slower on Zen 4, where the
// compiler then keeps accumulators in memory.
constexpr std::size_t slab_vectors(index_t hidden) noexcept {
  return static_cast<std::size_t>(hidden) <= simd::width ? 1 : 2;
}
constexpr std::size_t slab_width(index_t hidden) noexcept { return slab_vectors(hidden) * simd::width; }

template <std::size_t V>
void token_block_scores(const float* x, std::size_t count, std::size_t inputs, std::size_t slabs, const float* packed,
                        float* acc, float* out) {
  constexpr std::size_t slab_floats = V * simd::width;
  std::fill(acc, acc + count * simd::width, 0.f);
  for (std::size_t s = 0; s < slabs; ++s, packed += (inputs + 2) * slab_floats) {
    const float *b1 = packed + inputs * slab_floats, *w2 = b1 + slab_floats;
    for (std::size_t t = 0; t < count; t += token_tile)
      add_hidden_units<V>(x + t * inputs, inputs, packed, b1, w2, acc + t * simd::width);
  }
  for (std::size_t t = 0; t < count; ++t) out[t] = simd::sum(simd::load(acc + t * simd::width));
}

// Weights as the kernel wants them: slabs of hidden units, each [inputs rows of W1, b1, w2], padded with zeros.
inline std::size_t packed_weights_floats(index_t inputs, index_t hidden) noexcept {
  const std::size_t width = slab_width(hidden);
  return (static_cast<std::size_t>(hidden) + width - 1) / width * width * (static_cast<std::size_t>(inputs) + 2);
}
inline void pack_weights(const TokenNet<const float>& net, float* packed) {
  const auto width = static_cast<index_t>(slab_width(net.hidden));
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
inline std::size_t token_kernel_floats(index_t count) noexcept { return static_cast<std::size_t>(count) * simd::width; }

// out: [count], count a multiple of token_tile. x: [count][inputs]; packed: pack_weights(net).
inline void token_block_scores(const TokenNet<const float>& net, const float* packed, const float* x, index_t count,
                               float* work, float* out) {
  const std::size_t width = slab_width(net.hidden);
  const auto inputs = static_cast<std::size_t>(net.inputs), rows = static_cast<std::size_t>(count);
  const std::size_t slabs = (static_cast<std::size_t>(net.hidden) + width - 1) / width;
  if (slab_vectors(net.hidden) == 1) token_block_scores<1>(x, rows, inputs, slabs, packed, work, out);
  else token_block_scores<2>(x, rows, inputs, slabs, packed, work, out);
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
