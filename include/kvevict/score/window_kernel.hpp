// Inner loops of window attention. Query rows lie across the lanes of vectors, keys are broadcast: a key needs no
// transposition, a row's maximum and sum are lane-wise, and a column sum is one horizontal sum per key.
//   slot    place of a query row in the lanes; slots are padded to whole vectors
//   panel   up to two vectors of slots, packed [dim][panel width]
//   block   block_keys keys, whose products with a panel are held in registers
//   tile    tile_keys keys, staged as float32 in the L2 cache
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/score/window_lanes.hpp"

namespace kvevict::detail {

inline constexpr std::size_t block_keys = lanes::block_keys;
inline constexpr std::size_t tile_keys = 96;      // a multiple of block_keys
inline constexpr std::size_t stage_dims = 128;    // elements of a key that lie together in a staged tile ...
inline constexpr std::size_t stage_stride = 144;  // ... and where the next key begins: constant, and no power of two
inline constexpr std::size_t panel_vectors = 2;
static_assert(tile_keys % block_keys == 0);

constexpr std::size_t stage_floats(index_t dim) noexcept {
  return (static_cast<std::size_t>(dim) + stage_dims - 1) / stage_dims * tile_keys * stage_stride;
}

// Widens keys [first, first + count) to out [stage][tile_keys][stage_stride]; the last block is filled up with zeros.
template <class T>
void stage_tile(const Rows<const T>& keys, std::int64_t first, std::size_t count, float* out) {
  const auto dim = static_cast<std::size_t>(keys.cols);
  const std::size_t filled = (count + block_keys - 1) / block_keys * block_keys;
  for (std::size_t c = 0; c < dim; c += stage_dims, out += tile_keys * stage_stride) {
    const std::size_t n = std::min(stage_dims, dim - c), whole = n / lanes::width * lanes::width;
    for (std::size_t j = 0; j < filled; ++j) {
      float* const to = out + j * stage_stride;
      if (j >= count) {
        std::fill_n(to, n, 0.f);
        continue;
      }
      const T* const from =
          keys.row(first + static_cast<std::int64_t>(j)) + static_cast<std::int64_t>(c) * keys.col_stride;
      if (keys.col_stride == 1) {
        for (std::size_t i = 0; i < whole; i += lanes::width) lanes::store(lanes::widen(from + i), to + i);
        for (std::size_t i = whole; i < n; ++i) to[i] = to_float(from[i]);
      } else {
        for (std::size_t i = 0; i < n; ++i) to[i] = to_float(from[static_cast<std::int64_t>(i) * keys.col_stride]);
      }
    }
  }
}

// x [block_keys][stride] = products of a staged block with a panel of V vectors.
template <int V>
inline void block_products(const float* keys, const float* panel, std::size_t dim, float* x, std::size_t stride) {
  using lanes::Vec;
  constexpr int K = lanes::block_keys;
  Vec c[K][V];
  for (int i = 0; i < K; ++i)
    for (int v = 0; v < V; ++v) c[i][v] = lanes::zero();
  for (; dim > 0; keys += tile_keys * stage_stride) {
    const std::size_t n = std::min(dim, stage_dims);
    dim -= n;
    for (std::size_t k = 0; k < n; ++k, panel += V * lanes::width) {
      Vec b[V];
      for (int v = 0; v < V; ++v) b[v] = lanes::load(panel + static_cast<std::size_t>(v) * lanes::width);
      for (int i = 0; i < K; ++i) {
        const Vec a = lanes::set(keys[static_cast<std::size_t>(i) * stage_stride + k]);
        for (int v = 0; v < V; ++v) c[i][v] = lanes::mul_add(a, b[v], c[i][v]);
      }
    }
  }
  for (int i = 0; i < K; ++i)
    for (int v = 0; v < V; ++v)
      lanes::store(c[i][v], x + static_cast<std::size_t>(i) * stride + static_cast<std::size_t>(v) * lanes::width);
}
inline void block_products(std::size_t vectors, const float* keys, const float* panel, std::size_t dim, float* x,
                           std::size_t stride) {
  if (vectors == panel_vectors) block_products<panel_vectors>(keys, panel, dim, x, stride);
  else block_products<1>(keys, panel, dim, x, stride);
}

// What follows works on x [keys][stride] of `vectors` vectors; the arrays per slot begin at the panel's first slot.

// Hides keys first, first + 1, ... from the slots that see only `limit` keys of the tile.
inline void hide(float* x, std::size_t stride, std::size_t keys, std::size_t vectors, const float* limit,
                 std::size_t first) {
  const auto hidden = lanes::set(-std::numeric_limits<float>::infinity());
  for (std::size_t j = 0; j < keys; ++j, x += stride)
    for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width)
      lanes::store(
          lanes::visible(lanes::load(x + v), lanes::load(limit + v), lanes::set(static_cast<float>(first + j)), hidden),
          x + v);
}

// largest[slot] = max(largest[slot], x)
inline void take_largest(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors, float* largest) {
  for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width) {
    auto m = lanes::load(largest + v);
    for (std::size_t j = 0; j < keys; ++j) m = lanes::max(lanes::load(x + j * stride + v), m);
    lanes::store(m, largest + v);
  }
}

// x = 2^(x - reference), mass[slot] += x
inline void exponentiate(float* x, std::size_t stride, std::size_t keys, std::size_t vectors, const float* reference,
                         float* mass) {
  for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width) {
    const auto ref = lanes::load(reference + v);
    auto m = lanes::load(mass + v);
    for (std::size_t j = 0; j < keys; ++j) {
      const auto e = lanes::exp2(lanes::sub(lanes::load(x + j * stride + v), ref));
      lanes::store(e, x + j * stride + v);
      m = lanes::add(m, e);
    }
    lanes::store(m, mass + v);
  }
}

// sums[key][width] += weight * 2^(x - reference)
inline void add_weighted(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                         const float* reference, const float* weight, float* sums) {
  for (std::size_t j = 0; j < keys; ++j, x += stride, sums += lanes::width) {
    auto s = lanes::load(sums);
    for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width)
      s = lanes::mul_add(lanes::exp2(lanes::sub(lanes::load(x + v), lanes::load(reference + v))),
                         lanes::load(weight + v), s);
    lanes::store(s, sums);
  }
}

// out[key] = sum over the slots of weight * x, in the order of add_weighted
inline void weighted_sums(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                          const float* weight, float* out) {
  for (std::size_t j = 0; j < keys; ++j, x += stride) {
    auto s = lanes::zero();
    for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width)
      s = lanes::mul_add(lanes::load(x + v), lanes::load(weight + v), s);
    out[j] = lanes::sum(s);
  }
}

}  // namespace kvevict::detail
