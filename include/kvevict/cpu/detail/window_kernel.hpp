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
#include <utility>

#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/window_lanes.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

inline constexpr std::size_t block_keys = lanes::block_keys;
inline constexpr std::size_t tile_keys = 96;  // a multiple of block_keys
inline constexpr std::size_t panel_vectors = 2;
static_assert(tile_keys % block_keys == 0);

// Floats from one staged key to the next: whole cache lines, an odd number of them, lest keys share cache sets.
constexpr std::size_t stage_stride(index_t dim) noexcept {
  return ((static_cast<std::size_t>(dim) + 15) / 16 | 1) * 16;
}

// Widens keys [first, first + count) to out [tile_keys][stage_stride]; the last block is filled up with zeros.
template <class T>
void stage_tile(const Rows<const T>& keys, std::int64_t first, std::size_t count, float* out) {
  const auto dim = static_cast<std::size_t>(keys.cols), whole = dim / lanes::width * lanes::width;
  const std::size_t stride = stage_stride(keys.cols);
  for (std::size_t j = 0; j < count; ++j, out += stride) {
    const T* const from = keys.row(first + static_cast<std::int64_t>(j));
    if (keys.col_stride == 1) {
      for (std::size_t i = 0; i < whole; i += lanes::width) lanes::store(lanes::widen(from + i), out + i);
      for (std::size_t i = whole; i < dim; ++i) out[i] = to_float(from[i]);
    } else {
      for (std::size_t i = 0; i < dim; ++i) out[i] = to_float(from[static_cast<std::int64_t>(i) * keys.col_stride]);
    }
  }
  std::fill_n(out, (count + block_keys - 1) / block_keys * block_keys * stride - count * stride, 0.f);
}

// Products of one key with a panel: c += *key * b. Written out, so that c stays in registers at every optimisation
// level.
template <int V>
[[gnu::always_inline]] inline void add_products(const float* key, const lanes::Vec (&b)[V], lanes::Vec (&c)[V]) {
  const lanes::Vec a = lanes::set(*key);
  c[0] = lanes::mul_add(a, b[0], c[0]);
  if constexpr (V == 2) c[1] = lanes::mul_add(a, b[1], c[1]);
}
template <int V>
[[gnu::always_inline]] inline void load_vectors(const float* from, lanes::Vec (&to)[V]) {
  to[0] = lanes::load(from);
  if constexpr (V == 2) to[1] = lanes::load(from + lanes::width);
}
template <int V>
[[gnu::always_inline]] inline void store_vectors(const lanes::Vec (&from)[V], float* to) {
  lanes::store(from[0], to);
  if constexpr (V == 2) lanes::store(from[1], to + lanes::width);
}
template <int V>
[[gnu::always_inline]] inline void clear_vectors(lanes::Vec (&c)[V]) {
  c[0] = lanes::zero();
  if constexpr (V == 2) c[1] = lanes::zero();
}

// x [block_keys][V vectors] = products of a block of keys, `key_stride` floats apart, with a panel of V vectors.
// Never inlined: the registers are to hold the products alone. Three keys share a pointer, for there are not enough
// registers for a pointer each. KEY: 0, 1, ... block_keys - 1.
template <int V, std::size_t... KEY>
[[gnu::noinline]] void block_products(std::index_sequence<KEY...>, const float* keys, std::size_t key_stride,
                                      const float* panel, std::size_t dim, float* x) {
  constexpr std::size_t shared = 3;
  static_assert(block_keys % shared == 0 && sizeof...(KEY) == block_keys && V <= 2);
  const std::size_t offset[shared] = {0, key_stride, 2 * key_stride};
  const float* const row[block_keys] = {keys + KEY / shared * shared * key_stride...};
  lanes::Vec b[V], c[block_keys][V];
  (clear_vectors<V>(c[KEY]), ...);
#pragma GCC unroll 4
  for (std::size_t k = 0; k < dim; ++k, panel += V * lanes::width) {
    load_vectors<V>(panel, b);
    (add_products<V>(row[KEY / shared * shared] + (k + offset[KEY % shared]), b, c[KEY]), ...);
  }
  (store_vectors<V>(c[KEY], x + KEY * V * lanes::width), ...);
}
inline void block_products(std::size_t vectors, const float* keys, std::size_t key_stride, const float* panel,
                           std::size_t dim, float* x) {
  constexpr std::make_index_sequence<block_keys> all;
  if (vectors == panel_vectors) block_products<panel_vectors>(all, keys, key_stride, panel, dim, x);
  else block_products<1>(all, keys, key_stride, panel, dim, x);
}

// What follows works on x [keys][stride] of `vectors` vectors; the arrays per slot begin at the panel's first slot.

// Hides keys first, first + 1, ... from the slots that see only `limit` keys of the tile.
[[gnu::noinline]] inline void hide(float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                   const float* limit, std::size_t first) {
  const auto hidden = lanes::set(-std::numeric_limits<float>::infinity());
  for (std::size_t j = 0; j < keys; ++j, x += stride)
    for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width)
      lanes::store(
          lanes::visible(lanes::load(x + v), lanes::load(limit + v), lanes::set(static_cast<float>(first + j)), hidden),
          x + v);
}

// largest[slot] = max(largest[slot], x)
[[gnu::noinline]] inline void take_largest(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                           float* largest) {
  for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width) {
    auto m = lanes::load(largest + v);
    for (std::size_t j = 0; j < keys; ++j) m = lanes::max(lanes::load(x + j * stride + v), m);
    lanes::store(m, largest + v);
  }
}

// mass[slot] += 2^(x - reference). KEEP: and the exponentials go to kept [keys][kept_stride], past the caches, for they
// are not looked at before the last key has been seen.
template <bool KEEP>
[[gnu::noinline]] void add_mass(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                const float* reference, float* mass, float* kept, std::size_t kept_stride) {
  for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width) {
    const auto ref = lanes::load(reference + v);
    auto m = lanes::load(mass + v);
    for (std::size_t j = 0; j < keys; ++j) {
      const auto e = lanes::exp2(lanes::sub(lanes::load(x + j * stride + v), ref));
      if constexpr (KEEP) lanes::stream(e, kept + j * kept_stride + v);
      m = lanes::add(m, e);
    }
    lanes::store(m, mass + v);
  }
}

// sums[key][width] += weight * 2^(x - reference)
[[gnu::noinline]] inline void add_weighted(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
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
[[gnu::noinline]] inline void weighted_sums(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                            const float* weight, float* out) {
  for (std::size_t j = 0; j < keys; ++j, x += stride) {
    auto s = lanes::zero();
    for (std::size_t v = 0; v < vectors * lanes::width; v += lanes::width)
      s = lanes::mul_add(lanes::load(x + v), lanes::load(weight + v), s);
    out[j] = lanes::sum(s);
  }
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
