// LKV-T on the tensor cores: score = silu([key ; value ; features] W1 + b1) . w2 per token, with the walk of tile.hpp.
// Hidden units are the rows, keys and values the tokens. Weights are sums of terms in the cache's element type, scaled
// per hidden unit by a power of two, so that 16-bit products lose no more than float32 ones (token_network.cuh).
#pragma once
#include <cstdint>

#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"
#include "kvevict/cuda/detail/tile.hpp"
#include "kvevict/cuda/detail/window_steps.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// A hidden unit in float32. Padding units have w2 = 0.
struct HiddenUnit {
  float scale, b1, w2, far, near;  // far, near: weights of the distance features
};

// The distance features of a token.
struct Distances {
  float far, near;
};

// One layer. All pointers are device memory.
template <class T>
struct TokenArgs {
  const Rows<const T>*keys, *values;  // [heads] of [tokens][dim]
  const index_t* const* positions;    // [heads] of [tokens]; read with distance features only
  index_t heads, newest;              // position of the newest prompt row
  int key_blocks, value_blocks;       // 64-byte blocks of a row
  bool distance;
  const Piece* weights;      // [heads][row tile][term][block][half][lane], as staged
  const HiddenUnit* hidden;  // [heads][row tiles * tile_rows]
  int row_tiles, terms;
  int steps, chunk_tiles;
  float* out;  // [heads][out_stride]
  std::int64_t out_stride;
};

template <class T>
KVEVICT_HOST_DEVICE std::size_t token_shared_bytes(const TokenArgs<T>& args, int blocks, int tiles,
                                                   int warps) noexcept {
  return static_cast<std::size_t>(args.chunk_tiles * tile_pieces(blocks, args.terms)) * sizeof(Piece) +
         static_cast<std::size_t>(args.row_tiles * tile_rows) * sizeof(HiddenUnit) +
         (args.distance ? static_cast<std::size_t>(warps * tiles * tile_tokens) * sizeof(Distances) : 0);
}

// The features of lkv/token_net.hpp: distance to the newest prompt row, for the far and for the last few dozen rows.
template <class Cta>
KVEVICT_DEVICE float far_feature(const Cta& cta, index_t distance) {
  return 0.5f * cta.log1p(static_cast<float>(distance)) - 2.f;
}
template <class Cta>
KVEVICT_DEVICE float near_feature(const Cta& cta, index_t distance) {
  return 3.f * cta.exp2(static_cast<float>(distance) * (-log2_e / 16.f));
}

template <class T, int Blocks, int Tiles, class Cta>
struct TokenProblem {
  Cta& cta;
  const TokenArgs<T>& args;
  index_t head;
  const HiddenUnit* hidden;  // shared
  int row_tiles, chunk_tiles, terms, steps;
  index_t first, end;
  Distances* distances;  // shared, of this warp's tokens
  float score[Tiles][2];

  KVEVICT_DEVICE Piece row_piece(int tile, int row, int term, int block, int t) const {
    const std::int64_t at = (std::int64_t{head} * row_tiles + tile) * tile_pieces(Blocks, terms);
    return args.weights[at + ((term * Blocks + block) * 2 + row / 8) * warp_size + row % 8 * 4 + t];
  }
  struct TokenRow {
    PieceRow key, value;
  };
  KVEVICT_DEVICE TokenRow token_row(index_t token, int t) const {
    if (token >= end) return {};
    return {piece_row(args.keys[head], token, t), piece_row(args.values[head], token, t)};
  }
  KVEVICT_DEVICE Piece token_piece(const TokenRow& row, int block) const {
    return block < args.key_blocks ? row.key[block] : row.value[block - args.key_blocks];
  }
  KVEVICT_DEVICE void begin(index_t token) {
    KVEVICT_UNROLL
    for (int i = 0; i < 2 * Tiles; ++i) score[i / 2][i & 1] = 0.f;
    if (!args.distance) return;
    cta.sync_warp();  // the step before has read its features
    for (int i = cta.lane(); i < Tiles * tile_tokens; i += warp_size) {
      const index_t distance = token + i < end ? args.newest - args.positions[head][token + i] : 0;
      distances[i] = {far_feature(cta, distance), near_feature(cta, distance)};
    }
    cta.sync_warp();
  }
  KVEVICT_DEVICE void products(int tile, const float (&c)[Tiles][4], index_t) {
    KVEVICT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const HiddenUnit unit = hidden[tile * tile_rows + cta.lane() / 4 + 8 * half];
      KVEVICT_UNROLL
      for (int i = 0; i < 2 * Tiles; ++i) {
        float x = c[i / 2][2 * half + (i & 1)] * unit.scale + unit.b1;
        if (args.distance) {
          const Distances d = distances[token_of_register(cta.lane(), i / 2, i & 1)];
          x += unit.far * d.far + unit.near * d.near;
        }
        score[i / 2][i & 1] += unit.w2 * (x / (1.f + cta.exp2(-log2_e * x)));
      }
    }
  }
  KVEVICT_DEVICE void finish(index_t token) {
    KVEVICT_UNROLL
    for (int i = 0; i < 2 * Tiles; ++i) {
      const float sum = sum_over_rows(cta, score[i / 2][i & 1]);
      const index_t at = token + token_of_register(cta.lane(), i / 2, i & 1);
      if (cta.lane() < 4 && at < end) args.out[head * args.out_stride + at] = finite_or_nan(sum);
    }
  }
};

// Block (x, y) = (part of the tokens, head).
template <class T, int Blocks, int Tiles, class Cta>
KVEVICT_DEVICE void score_tokens(Cta& cta, const TokenArgs<T>& args, unsigned char* shared) {
  const index_t head = cta.block_y();
  auto* staged = reinterpret_cast<Piece*>(shared);
  auto* hidden = reinterpret_cast<HiddenUnit*>(staged + args.chunk_tiles * tile_pieces(Blocks, args.terms));
  const int units = args.row_tiles * tile_rows;
  for (int i = cta.thread(); i < units; i += cta.threads()) hidden[i] = args.hidden[std::int64_t{head} * units + i];
  auto* distances = reinterpret_cast<Distances*>(hidden + units) + cta.warp() * (Tiles * tile_tokens);
  const index_t columns = args.steps * cta.warps() * (Tiles * tile_tokens);
  TokenProblem<T, Blocks, Tiles, Cta> problem{
      cta, args,      head, hidden, args.row_tiles, args.chunk_tiles, args.terms, args.steps, cta.block_x() * columns,
      0,   distances, {}};
  problem.end = min(static_cast<index_t>(args.keys[head].rows), problem.first + columns);
  if (problem.first < problem.end) walk_tiles<T, Blocks, Tiles>(cta, problem, staged);
}

// ---- keys before RoPE ----
// Rotates keys back and widens rows to float32, for checkpoints that were trained so. Angles come from two tables
// in double, position = 64 a + b, as rope/rope_table.hpp has them: [position / 64] and [64] rows of cos and sin.
struct RotationArgs {
  const float* inv_freq;  // [pairs]
  index_t pairs;
  bool interleaved;
  float attention_factor;
  float *coarse, *fine;  // [newest / 64 + 1][2 * pairs], [64][2 * pairs]
  index_t coarse_rows;
};
inline constexpr index_t rotation_step = 64;

// Thread i of block x handles entry x * threads + i of both tables.
template <class Cta>
KVEVICT_DEVICE void fill_rotations(Cta& cta, const RotationArgs& args) {
  const std::int64_t i = std::int64_t{cta.block_x()} * cta.threads() + cta.thread();
  const std::int64_t row = i / args.pairs, pair = i % args.pairs;
  if (row >= args.coarse_rows + rotation_step) return;
  const bool coarse = row < args.coarse_rows;
  const std::int64_t at = coarse ? row : row - args.coarse_rows;
  const double factor = coarse ? 1.0 : 1.0 / static_cast<double>(args.attention_factor);
  const double angle = static_cast<double>(coarse ? at * rotation_step : at) * static_cast<double>(args.inv_freq[pair]);
  float* out = (coarse ? args.coarse : args.fine) + at * 2 * args.pairs;
  out[pair] = static_cast<float>(factor * cta.cosine(angle));
  out[args.pairs + pair] = static_cast<float>(factor * cta.sine(angle));
}

// Rows of one head as dense float32, [tokens][packed_stride] with zeros behind their end; rotated back where
// `rotations` is not null. Thread i of block x handles element x * threads + i.
template <class T, class Cta>
KVEVICT_DEVICE void widen_rows(Cta& cta, const Rows<const T>& from, const index_t* positions,
                               const RotationArgs* rotations, float* to) {
  const std::int64_t i = std::int64_t{cta.block_x()} * cta.threads() + cta.thread();
  const std::int64_t stride = packed_stride<float>(from.cols), row = i / stride;
  const auto col = static_cast<index_t>(i % stride);
  if (row >= from.rows) return;
  float x = col < from.cols ? to_float(from.at(row, col)) : 0.f;
  if (rotations && col < 2 * rotations->pairs) {
    const index_t pair = rotations->interleaved ? col / 2 : col % rotations->pairs;
    const bool second = rotations->interleaved ? col % 2 == 1 : col >= rotations->pairs;
    const index_t other = rotations->interleaved ? col ^ 1 : second ? col - rotations->pairs : col + rotations->pairs;
    const float y = to_float(from.at(row, other));
    const index_t p = positions[row];
    const float* a = rotations->coarse + std::int64_t{p / rotation_step} * 2 * rotations->pairs;
    const float* b = rotations->fine + std::int64_t{p % rotation_step} * 2 * rotations->pairs;
    const index_t s = rotations->pairs + pair;
    const float cosine = a[pair] * b[pair] - a[s] * b[s], sine = a[s] * b[pair] + a[pair] * b[s];
    x = second ? x * cosine - y * sine : x * cosine + y * sine;
  }
  to[i] = x;
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
