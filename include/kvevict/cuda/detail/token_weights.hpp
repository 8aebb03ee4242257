// LKV-T weights in the form that the kernels stage: fragments of the cache's element type. Made once on the host.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/tile.hpp"
#include "kvevict/cuda/detail/token_steps.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// Terms that a float32 weight is the sum of, to within 2^-21 of the unit's largest weight: products of 16-bit elements
// are exact, so nothing else is lost. float32 is split by the kernel itself.
template <class T>
inline constexpr int weight_terms = std::is_same_v<T, float>    ? 1
                                    : std::is_same_v<T, fp16_t> ? 2
                                                                : 3;

template <class T>
struct TokenWeights {
  int key_blocks = 0, value_blocks = 0, blocks = 0;  // blocks: what the kernel walks, zero behind keys and values
  int row_tiles = 0;
  std::vector<Piece> pieces;       // [head][row tile][term][block][half][lane]
  std::vector<HiddenUnit> hidden;  // [head][row_tiles * tile_rows]
};

// Appends one head's network. `blocks` is the kernel's instantiation: at least the blocks of a key and of a value.
template <class T>
void add_head(TokenWeights<T>& to, const TokenNet<const float>& net, index_t key_cols, index_t value_cols, int blocks) {
  constexpr int terms = weight_terms<T>, elements = block_bytes / static_cast<int>(sizeof(T));
  to.key_blocks = blocks_of<T>(key_cols);
  to.value_blocks = blocks_of<T>(value_cols);
  to.blocks = blocks;
  to.row_tiles = static_cast<int>(ceil_div<index_t>(net.hidden, tile_rows));
  const std::size_t first = to.pieces.size();
  to.pieces.resize(first + static_cast<std::size_t>(to.row_tiles * tile_pieces(blocks, terms)), Piece{{0, 0, 0, 0}});
  for (index_t u = 0; u < to.row_tiles * tile_rows; ++u) {
    HiddenUnit unit{1.f, 0.f, 0.f, 0.f, 0.f};
    if (u < net.hidden) {
      const auto weight = [&](index_t input) { return net.w1[std::int64_t{input} * net.hidden + u]; };
      float largest = 0.f;
      for (index_t i = 0; i < key_cols + value_cols; ++i) largest = std::max(largest, std::abs(weight(i)));
      int exponent = 0;
      if (largest > 0.f) std::frexp(largest, &exponent);
      unit = {std::ldexp(1.f, exponent), net.b1[u], net.w2[u], 0.f, 0.f};
      if (net.inputs > key_cols + value_cols) {
        unit.far = weight(key_cols + value_cols);
        unit.near = weight(key_cols + value_cols + 1);
      }
      for (index_t i = 0; i < key_cols + value_cols; ++i) {
        const bool value = i >= key_cols;
        const index_t col = value ? i - key_cols : i;
        const int block = static_cast<int>(col / elements) + (value ? to.key_blocks : 0);
        const int in_block = static_cast<int>(col % elements), per_piece = elements / 4;
        float rest = std::ldexp(weight(i), -exponent);
        for (int term = 0; term < terms; ++term) {
          const T part = from_float<T>(rest);
          rest -= to_float(part);
          const int row = static_cast<int>(u % tile_rows), lane = row % 8 * 4 + in_block / per_piece;
          const std::size_t at =
              first + static_cast<std::size_t>((((u / tile_rows) * terms + term) * blocks + block) * 2 * warp_size +
                                               row / 8 * warp_size + lane);
          const int e = in_block % per_piece;
          if constexpr (std::is_same_v<T, float>) to.pieces[at].word[e] = kvevict::detail::bits_of(part);
          else to.pieces[at].word[e / 2] |= static_cast<std::uint32_t>(part.bits) << (16 * (e & 1));
        }
      }
    }
    to.hidden.push_back(unit);
  }
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
