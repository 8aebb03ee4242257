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
#include "kvevict/cpu/vector.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Keys and vectors of query rows whose products are held in registers at a time: 24 of 32, or 12 of 16. Portable code
// keeps to 3 keys on every machine, for the last bits of scores depend on the first keys (WindowHead::run).
inline constexpr std::size_t block_keys = !KVEVICT_SIMD ? 3 : simd::registers == 32 ? 12 : 6;
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
  const std::size_t stride = stage_stride(keys.cols);
  for (std::size_t j = 0; j < count; ++j, out += stride)
    simd::widen_row(keys.row(first + static_cast<std::int64_t>(j)), keys.col_stride, keys.cols, out);
  std::fill_n(out, (count + block_keys - 1) / block_keys * block_keys * stride - count * stride, 0.f);
}

// Products of one key with a panel: c += *key * b. Written out, so that c stays in registers at every optimisation
// level.
template <int V>
[[gnu::always_inline]] inline void add_products(const float* key, const simd::Vec (&b)[V], simd::Vec (&c)[V]) {
  const simd::Vec a = simd::set(*key);
  c[0] = simd::mul_add(a, b[0], c[0]);
  if constexpr (V == 2) c[1] = simd::mul_add(a, b[1], c[1]);
}
template <int V>
[[gnu::always_inline]] inline void load_vectors(const float* from, simd::Vec (&to)[V]) {
  to[0] = simd::load(from);
  if constexpr (V == 2) to[1] = simd::load(from + simd::width);
}
template <int V>
[[gnu::always_inline]] inline void store_vectors(const simd::Vec (&from)[V], float* to) {
  simd::store(from[0], to);
  if constexpr (V == 2) simd::store(from[1], to + simd::width);
}
template <int V>
[[gnu::always_inline]] inline void clear_vectors(simd::Vec (&c)[V]) {
  c[0] = simd::zero();
  if constexpr (V == 2) c[1] = simd::zero();
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
  simd::Vec b[V], c[block_keys][V];
  (clear_vectors<V>(c[KEY]), ...);
#pragma GCC unroll 4
  for (std::size_t k = 0; k < dim; ++k, panel += V * simd::width) {
    load_vectors<V>(panel, b);
    (add_products<V>(row[KEY / shared * shared] + (k + offset[KEY % shared]), b, c[KEY]), ...);
  }
  (store_vectors<V>(c[KEY], x + KEY * V * simd::width), ...);
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
  const auto hidden = simd::set(-std::numeric_limits<float>::infinity());
  for (std::size_t j = 0; j < keys; ++j, x += stride)
    for (std::size_t v = 0; v < vectors * simd::width; v += simd::width)
      simd::store(
          simd::if_greater(simd::load(limit + v), simd::set(static_cast<float>(first + j)), simd::load(x + v), hidden),
          x + v);
}

// largest[slot] = max(largest[slot], x)
[[gnu::noinline]] inline void take_largest(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                           float* largest) {
  for (std::size_t v = 0; v < vectors * simd::width; v += simd::width) {
    auto m = simd::load(largest + v);
    for (std::size_t j = 0; j < keys; ++j) m = simd::max(simd::load(x + j * stride + v), m);
    simd::store(m, largest + v);
  }
}

// mass[slot] += 2^(x - reference). KEEP: and the exponentials go to kept [keys][kept_stride], past the caches, for they
// are not looked at before the last key has been seen.
template <bool KEEP>
[[gnu::noinline]] void add_mass(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                const float* reference, float* mass, float* kept, std::size_t kept_stride) {
  for (std::size_t v = 0; v < vectors * simd::width; v += simd::width) {
    const auto ref = simd::load(reference + v);
    auto m = simd::load(mass + v);
    for (std::size_t j = 0; j < keys; ++j) {
      const auto e = simd::exp2(simd::sub(simd::load(x + j * stride + v), ref));
      if constexpr (KEEP) simd::stream(e, kept + j * kept_stride + v);
      m = simd::add(m, e);
    }
    simd::store(m, mass + v);
  }
}

// sums[key][width] += weight * 2^(x - reference)
[[gnu::noinline]] inline void add_weighted(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                           const float* reference, const float* weight, float* sums) {
  for (std::size_t j = 0; j < keys; ++j, x += stride, sums += simd::width) {
    auto s = simd::load(sums);
    for (std::size_t v = 0; v < vectors * simd::width; v += simd::width)
      s = simd::mul_add(simd::exp2(simd::sub(simd::load(x + v), simd::load(reference + v))), simd::load(weight + v), s);
    simd::store(s, sums);
  }
}

// out[key] = sum over the slots of weight * x, in the order of add_weighted
[[gnu::noinline]] inline void weighted_sums(const float* x, std::size_t stride, std::size_t keys, std::size_t vectors,
                                            const float* weight, float* out) {
  for (std::size_t j = 0; j < keys; ++j, x += stride) {
    auto s = simd::zero();
    for (std::size_t v = 0; v < vectors * simd::width; v += simd::width)
      s = simd::mul_add(simd::load(x + v), simd::load(weight + v), s);
    out[j] = simd::sum(s);
  }
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
