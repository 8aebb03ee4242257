// Scorers that look at keys alone (norm, KeyDiff) or at nothing (position), and protect=score. Sixteen lanes take a
// row, 16 bytes each.
#pragma once
#include <cstdint>
#include <type_traits>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"
#include "kvevict/cuda/detail/tile.hpp"
#include "kvevict/score/row_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

inline constexpr int row_lanes = 16, most_row_pieces = 4;  // rows of up to 64 pieces of 16 bytes

template <class T>
struct KeyArgs {
  const Rows<const T>* keys;  // [heads] of [tokens][dim]
  float* out;                 // [heads][out_stride]
  std::int64_t out_stride;
  std::int32_t* largest;  // raised to the ordered key of the largest score; may be null
  // KeyDiff
  float* partial;  // [heads][parts][dim]: sums of k / |k|
  index_t parts;
};

// Element e of a piece, as float32.
template <class T>
KVEVICT_HOST_DEVICE float piece_element(const Piece& piece, int e) noexcept {
  if constexpr (std::is_same_v<T, float>) return kvevict::detail::float_of(piece.word[e]);
  else return to_float(T{static_cast<std::uint16_t>(piece.word[e / 2] >> (16 * (e & 1)))});
}

// A row over sixteen lanes.
template <class T>
struct RowPieces {
  static constexpr int elements = 16 / static_cast<int>(sizeof(T));
  Piece piece[most_row_pieces];
};
template <class T>
KVEVICT_DEVICE RowPieces<T> load_row(const Rows<const T>& rows, std::int64_t row, int lane) {
  RowPieces<T> out;
  KVEVICT_UNROLL
  for (int p = 0; p < most_row_pieces; ++p) {
    const int at = lane % row_lanes + p * row_lanes;
    out.piece[p] = Piece{{0, 0, 0, 0}};
    if (row < rows.rows && at * RowPieces<T>::elements < rows.cols)
      out.piece[p] = load_piece(rows.row(row), rows.cols, at / 4, at % 4);
  }
  return out;
}
// Sum over the sixteen lanes of a row.
template <class Cta>
KVEVICT_DEVICE float row_sum(Cta& cta, float value) {
  for (int step = row_lanes / 2; step > 0; step /= 2) value += cta.shuffle_xor(value, step);
  return value;
}
template <class T, class Cta>
KVEVICT_DEVICE float row_norm(Cta& cta, const RowPieces<T>& row) {
  float sum = 0.f;
  KVEVICT_UNROLL
  for (int p = 0; p < most_row_pieces; ++p)
    for (int e = 0; e < RowPieces<T>::elements; ++e) {
      const float x = piece_element<T>(row.piece[p], e);
      sum += x * x;
    }
  return cta.sqrt(row_sum(cta, sum));
}

template <class Cta>
KVEVICT_DEVICE void raise_largest(Cta& cta, std::int32_t* word, std::int32_t key) {
  if (!word) return;
  key = warp_max(cta, key);
  if (cta.lane() == 0) cta.largest_global(*word, key);
}

// Block (x, y) = (part of the tokens, head); parts of `threads / 16` rows follow each other with the grid's stride.
template <class T, class Cta>
KVEVICT_DEVICE void score_norms(Cta& cta, const KeyArgs<T>& args) {
  const index_t head = cta.block_y();
  const Rows<const T> keys = args.keys[head];
  const int rows = cta.threads() / row_lanes;
  std::int32_t largest = -infinity_key;
  for (std::int64_t base = std::int64_t{cta.block_x()} * rows; base < keys.rows;
       base += std::int64_t{args.parts} * rows) {
    const std::int64_t row = base + cta.thread() / row_lanes;
    const float score = -row_norm(cta, load_row(keys, row, cta.lane()));
    if (row >= keys.rows) continue;
    largest = max(largest, ordered_key(score));
    if (cta.lane() % row_lanes == 0) args.out[head * args.out_stride + row] = score;
  }
  raise_largest(cta, args.largest, largest);
}

// KeyDiff, first pass: sums of unit keys over a part. shared: [threads / 16][dim] floats.
template <class T, class Cta>
KVEVICT_DEVICE void sum_directions(Cta& cta, const KeyArgs<T>& args, float* shared) {
  constexpr int elements = RowPieces<T>::elements;
  const index_t head = cta.block_y();
  const Rows<const T> keys = args.keys[head];
  const int rows = cta.threads() / row_lanes, own = cta.thread() / row_lanes;
  float sum[most_row_pieces][elements] = {};
  for (std::int64_t base = std::int64_t{cta.block_x()} * rows; base < keys.rows;
       base += std::int64_t{args.parts} * rows) {
    const RowPieces<T> row = load_row(keys, base + own, cta.lane());
    const float inverse = 1.f / max(row_norm(cta, row), 1e-12f);
    KVEVICT_UNROLL
    for (int p = 0; p < most_row_pieces; ++p)
      for (int e = 0; e < elements; ++e) sum[p][e] += piece_element<T>(row.piece[p], e) * inverse;
  }
  KVEVICT_UNROLL
  for (int p = 0; p < most_row_pieces; ++p)
    for (int e = 0; e < elements; ++e) {
      const index_t col = (cta.lane() % row_lanes + p * row_lanes) * elements + e;
      if (col < keys.cols) shared[std::int64_t{own} * keys.cols + col] = sum[p][e];
    }
  cta.sync();
  float* out = args.partial + (std::int64_t{head} * args.parts + cta.block_x()) * keys.cols;
  for (index_t c = cta.thread(); c < keys.cols; c += cta.threads()) {
    double all = 0;
    for (int r = 0; r < rows; ++r) all += static_cast<double>(shared[std::int64_t{r} * keys.cols + c]);
    out[c] = static_cast<float>(all);
  }
}

// Second pass: -cos of each key with the mean direction. shared: [dim] floats.
template <class T, class Cta>
KVEVICT_DEVICE void score_directions(Cta& cta, const KeyArgs<T>& args, float* shared) {
  const index_t head = cta.block_y();
  const Rows<const T> keys = args.keys[head];
  for (index_t c = cta.thread(); c < keys.cols; c += cta.threads()) {
    double all = 0;
    for (index_t p = 0; p < args.parts; ++p)
      all += static_cast<double>(args.partial[(std::int64_t{head} * args.parts + p) * keys.cols + c]);
    shared[c] = static_cast<float>(all / static_cast<double>(max<std::int64_t>(1, keys.rows)));
  }
  cta.sync();
  float squares = 0.f;
  for (index_t c = cta.lane(); c < keys.cols; c += warp_size) squares += shared[c] * shared[c];
  const float length = cta.sqrt(warp_sum(cta, squares));
  const int rows = cta.threads() / row_lanes;
  std::int32_t largest = -infinity_key;
  for (std::int64_t base = std::int64_t{cta.block_x()} * rows; base < keys.rows;
       base += std::int64_t{args.parts} * rows) {
    const std::int64_t row = base + cta.thread() / row_lanes;
    const RowPieces<T> key = load_row(keys, row, cta.lane());
    float dot = 0.f;
    KVEVICT_UNROLL
    for (int p = 0; p < most_row_pieces; ++p)
      for (int e = 0; e < RowPieces<T>::elements; ++e) {
        const index_t col = (cta.lane() % row_lanes + p * row_lanes) * RowPieces<T>::elements + e;
        if (col < keys.cols) dot += piece_element<T>(key.piece[p], e) * shared[col];
      }
    dot = row_sum(cta, dot);
    const float score = -dot / max(row_norm(cta, key) * length, 1e-8f);
    if (row >= keys.rows) continue;
    largest = max(largest, ordered_key(score));
    if (cta.lane() % row_lanes == 0) args.out[head * args.out_stride + row] = score;
  }
  raise_largest(cta, args.largest, largest);
}

// Scores of one layer that need its token counts alone.
struct RowArgs {
  const index_t* tokens;  // [rows]
  const float* scores;    // [rows][stride]
  float* out;             // [rows][stride]
  std::int64_t stride;
  std::int32_t* largest;
};

// Block (x, y) = (part, row), threads * parts apart: newer rows are better.
template <class Cta>
KVEVICT_DEVICE void score_positions(Cta& cta, const RowArgs& args, index_t parts) {
  const index_t row = cta.block_y(), tokens = args.tokens[row];
  for (std::int64_t i = std::int64_t{cta.block_x()} * cta.threads() + cta.thread(); i < tokens;
       i += std::int64_t{parts} * cta.threads())
    args.out[row * args.stride + i] = static_cast<float>(i);
  if (args.largest && cta.block_x() == 0 && cta.thread() == 0 && tokens > 0)
    cta.largest_global(*args.largest, ordered_key(static_cast<float>(tokens - 1)));
}

// What scorers of single rows look at; arrays that a scorer does not need are null.
template <class T>
struct RowScorerArgs {
  const Rows<const T>* keys = nullptr;        // [heads]
  const Rows<const T>* values = nullptr;      // [heads]
  const index_t* const* positions = nullptr;  // [heads] of [tokens]
  const index_t* tokens = nullptr;            // [heads]
  index_t layer = 0, parts = 1;
  float* out = nullptr;  // [heads][stride]
  std::int64_t stride = 0;
  std::int32_t* largest = nullptr;  // raised to the ordered key of the largest score; may be null
};

// Block (x, y) = (part, head), threads * parts rows apart: a thread scores a row (score/row_scorer.hpp).
template <class T, class Cta, class Scorer>
KVEVICT_DEVICE void score_rows(Cta& cta, const RowScorerArgs<T>& args, const Scorer& scorer) {
  const index_t head = cta.block_y(), tokens = args.tokens[head];
  const auto elements = [](const Rows<const T>* rows, index_t h, std::int64_t r) {
    return rows ? score::RowElements<T>{rows[h].row(r), rows[h].cols, rows[h].col_stride} : score::RowElements<T>{};
  };
  std::int32_t largest = -infinity_key;
  for (std::int64_t i = std::int64_t{cta.block_x()} * cta.threads() + cta.thread(); i < tokens;
       i += std::int64_t{args.parts} * cta.threads()) {
    const score::ScoredRow<T> row{args.layer,
                                  head,
                                  static_cast<index_t>(i),
                                  args.positions ? args.positions[head][i] : 0,
                                  elements(args.keys, head, i),
                                  elements(args.values, head, i)};
    const float score = scorer.score_row(row);
    args.out[head * args.stride + i] = score;
    largest = max(largest, ordered_key(score));
  }
  raise_largest(cta, args.largest, largest);
}

// protect=score: the first rows get the layer's largest score + 1, or 1 where no row had a score. Block x = row x.
template <class Cta>
KVEVICT_DEVICE void raise_sinks(Cta& cta, const RowArgs& args, index_t sinks) {
  const index_t row = cta.block_x();
  const std::int32_t key = *args.largest;
  const float value = key > -infinity_key && key < infinity_key ? score_of_key(key) + 1.f : 1.f;
  for (index_t i = cta.thread(); i < min(sinks, args.tokens[row]); i += cta.threads())
    args.out[row * args.stride + i] = value;
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
