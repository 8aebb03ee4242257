// Products of query (or weight) rows with all tokens of a head on the tensor cores, shaped for scoring: nothing of size
// [rows][tokens] exists. A warp keeps the rows of Tiles * 8 tokens in registers, in the very fragments that mma.sync
// reads, and walks over row tiles of 16 that the block has staged in shared memory; an epilogue turns the 16 x 8
// products into sums over rows.
//
// A fragment register pairs elements k of both operands, and a dot product does not care in which order they are taken.
// So the order is chosen such that every lane loads 16 contiguous bytes per 64-byte block of a row: with g = lane / 4
// and t = lane % 4, a lane holds bytes [16 t, 16 t + 16) of row (or token) g, and these are two steps of m16n8k16
// (16-bit) or of m16n8k8 (float32 as TF32). Loads of a warp then cover whole 32-byte sectors, without a copy of the
// tokens through shared memory, and the staged rows are read without bank conflicts.
#pragma once
#include <cstdint>
#include <type_traits>

#include "kvevict/config.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// 16 bytes of a row.
struct alignas(16) Piece {
  std::uint32_t word[4];
};
inline constexpr int block_bytes = 64, tile_rows = 16, tile_tokens = 8;

template <class T>
KVEVICT_HOST_DEVICE constexpr int blocks_of(index_t cols) noexcept {
  return static_cast<int>(ceil_div<std::int64_t>(std::int64_t{cols} * static_cast<int>(sizeof(T)), block_bytes));
}

// Bytes [block * 64 + t * 16, + 16) of a row, zero behind its end. The row is aligned to 16 bytes, dense, and padded
// with zeros to a multiple of 16 bytes (rows_are_whole, or packed by pack_rows).
template <class T>
KVEVICT_HOST_DEVICE Piece load_piece(const T* row, index_t cols, int block, int t) noexcept {
  constexpr int elements = 16 / static_cast<int>(sizeof(T));
  const index_t first = (block * 4 + t) * elements;
  if (first < cols) return *reinterpret_cast<const Piece*>(row + first);
  return Piece{{0, 0, 0, 0}};
}

// The pieces t, t + 4, ... of a row; no bytes where there is no row.
struct PieceRow {
  const Piece* first = nullptr;
  int bytes = 0;

  KVEVICT_HOST_DEVICE Piece operator[](int block) const noexcept {
    return block * block_bytes < bytes ? first[block * 4] : Piece{{0, 0, 0, 0}};
  }
};
// As Rows::row, with a 32-bit division: a 64-bit one is a call that no registers are left for.
template <class T>
KVEVICT_HOST_DEVICE PieceRow piece_row(const Rows<const T>& rows, index_t r, int t) noexcept {
  const T* row = rows.data;
  if (rows.blocks) {
    const index_t block = r / rows.block_rows;
    row += rows.blocks[block] * rows.block_stride + (r - block * rows.block_rows) * rows.row_stride;
  } else {
    row += r * rows.row_stride;
  }
  return {reinterpret_cast<const Piece*>(row) + t, rows.cols * static_cast<int>(sizeof(T)) - 16 * t};
}

// Whether every 16-byte piece of every row is one aligned load.
template <class T>
KVEVICT_HOST_DEVICE bool rows_are_whole(const Rows<const T>& rows) noexcept {
  constexpr std::int64_t elements = 16 / static_cast<std::int64_t>(sizeof(T));
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.col_stride == 1 && rows.cols % elements == 0 &&
         rows.row_stride % elements == 0 && rows.block_stride % elements == 0;
}
// Elements from row to row that pack_rows makes.
template <class T>
KVEVICT_HOST_DEVICE constexpr std::int64_t packed_stride(index_t cols) noexcept {
  return round_up<std::int64_t>(cols, 16 / static_cast<std::int64_t>(sizeof(T)));
}
// Copies rows that are not whole to dense ones, [rows][packed_stride], with zeros behind their end. Thread i of block x
// handles element x * threads + i.
template <class T, class Cta>
KVEVICT_DEVICE void pack_rows(Cta& cta, const Rows<const T>& from, T* to) {
  const std::int64_t stride = packed_stride<T>(from.cols),
                     i = std::int64_t{cta.block_x()} * cta.threads() + cta.thread();
  if (i >= from.rows * stride) return;
  to[i] = i % stride < from.cols ? from.at(i / stride, i % stride) : T{};
}

// The part of a float that TF32 keeps, and the rest; their sum is the float.
KVEVICT_HOST_DEVICE constexpr std::uint32_t tf32_high(std::uint32_t bits) noexcept { return bits & 0xffffe000u; }
KVEVICT_HOST_DEVICE constexpr std::uint32_t tf32_low(std::uint32_t bits) noexcept {
  return kvevict::detail::bits_of(kvevict::detail::float_of(bits) - kvevict::detail::float_of(tf32_high(bits)));
}

// c += rows * tokens over one 64-byte block; low and high: rows g and g + 8 of the row tile. Float32 is taken as two
// TF32 terms, three products, which leaves an error below 2^-19 of the elements' product.
template <class T, class Cta>
KVEVICT_DEVICE void multiply_block(Cta& cta, float (&c)[4], const Piece& low, const Piece& high, const Piece& tokens) {
  KVEVICT_UNROLL
  for (int s = 0; s < 2; ++s) {
    const std::uint32_t a[4] = {low.word[2 * s], high.word[2 * s], low.word[2 * s + 1], high.word[2 * s + 1]};
    if constexpr (std::is_same_v<T, float>) {
      // Opaque: split tokens would be kept over all row tiles, and there are no registers for that.
      const std::uint32_t b0 = cta.opaque(tokens.word[2 * s]), b1 = cta.opaque(tokens.word[2 * s + 1]);
      const std::uint32_t a_high[4] = {tf32_high(a[0]), tf32_high(a[1]), tf32_high(a[2]), tf32_high(a[3])};
      const std::uint32_t a_low[4] = {tf32_low(a[0]), tf32_low(a[1]), tf32_low(a[2]), tf32_low(a[3])};
      cta.multiply(T{}, c, a_low, tf32_high(b0), tf32_high(b1));
      cta.multiply(T{}, c, a_high, tf32_low(b0), tf32_low(b1));
      cta.multiply(T{}, c, a_high, tf32_high(b0), tf32_high(b1));
    } else {
      cta.multiply(T{}, c, a, tokens.word[2 * s], tokens.word[2 * s + 1]);
    }
  }
}

// What of the products a lane holds in c[tile][i]: its row in the row tile and its token in the warp's tokens.
KVEVICT_HOST_DEVICE constexpr int row_of_register(int lane, int i) noexcept { return lane / 4 + 8 * (i / 2); }
KVEVICT_HOST_DEVICE constexpr int token_of_register(int lane, int tile, int i) noexcept {
  return tile * tile_tokens + 2 * (lane % 4) + (i & 1);
}
// The same from the lane's first token on.
KVEVICT_HOST_DEVICE constexpr int token_offset(int tile, int i) noexcept { return tile * tile_tokens + (i & 1); }

// Pieces of a staged row tile: [term][block][half of the rows][lane].
KVEVICT_HOST_DEVICE constexpr int tile_pieces(int blocks, int terms) noexcept { return terms * blocks * 2 * warp_size; }

// The walk over row tiles and tokens. Problem:
//   int row_tiles, chunk_tiles, terms, steps     chunk_tiles: row tiles staged at once; terms: rows are sums of terms
//   Piece row_piece(row tile, row in it, term, block, t)
//   TokenRow token_row(token, t), Piece token_piece(TokenRow, block)   zero outside the head's tokens
//   index_t first, end                           tokens [first, end) of this block; steps cover them
//   begin(token)  products(row tile, c, token)  finish(token)     per warp and step; token: first of the warp's tokens
// staged: [chunk_tiles * tile_pieces] in shared memory. Ends with the block not synchronised.
template <class T, int Blocks, int Tiles, class Cta, class Problem>
KVEVICT_DEVICE void walk_tiles(Cta& cta, Problem& problem, Piece* staged) {
  const int pieces = tile_pieces(Blocks, problem.terms);
  const bool resident = problem.row_tiles <= problem.chunk_tiles;
  const int g = cta.lane() / 4, t = cta.lane() % 4;
  for (int step = 0; step < problem.steps; ++step) {
    const index_t token = problem.first + (step * cta.warps() + cta.warp()) * (Tiles * tile_tokens);
    const bool active = token < problem.end;  // the same in the whole warp
    Piece tokens[Tiles][Blocks];
    KVEVICT_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      const auto row = problem.token_row(token + tile * tile_tokens + g, t);
      KVEVICT_UNROLL
      for (int block = 0; block < Blocks; ++block) tokens[tile][block] = problem.token_piece(row, block);
    }
    problem.begin(token);
    for (int chunk = 0; chunk < problem.row_tiles; chunk += problem.chunk_tiles) {
      const int count = min(problem.chunk_tiles, problem.row_tiles - chunk);
      if (!resident || step == 0) {
        cta.sync();
        KVEVICT_NO_UNROLL
        for (int i = cta.thread(); i < count * pieces; i += cta.threads()) {
          const int lane = i % warp_size, half = i / warp_size % 2, block = i / (2 * warp_size) % Blocks;
          const int term = i / (2 * warp_size * Blocks) % problem.terms, tile = i / pieces;
          staged[i] = problem.row_piece(chunk + tile, half * 8 + lane / 4, term, block, lane % 4);
        }
        cta.sync();
      }
      if (!active) continue;
      KVEVICT_NO_UNROLL
      for (int r = 0; r < count; ++r) {
        float c[Tiles][4] = {};
        for (int term = 0; term < problem.terms; ++term) {
          const Piece* rows = staged + r * pieces + term * tile_pieces(Blocks, 1) + cta.lane();
          KVEVICT_UNROLL
          for (int block = 0; block < Blocks; ++block) {
            const Piece low = rows[block * 2 * warp_size], high = rows[block * 2 * warp_size + warp_size];
            KVEVICT_UNROLL
            for (int tile = 0; tile < Tiles; ++tile) multiply_block<T>(cta, c[tile], low, high, tokens[tile][block]);
          }
        }
        problem.products(chunk + r, c, token);
      }
    }
    if (active) problem.finish(token);
  }
}

// Sums over the 16 rows of a tile end in the four lanes that share columns: adds over g.
template <class Cta>
KVEVICT_DEVICE float sum_over_rows(Cta& cta, float value) {
  value += cta.shuffle_xor(value, 4);
  value += cta.shuffle_xor(value, 8);
  value += cta.shuffle_xor(value, 16);
  return value;
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
