// The SnapKV window scorer as kernels over tile.hpp: log-sum-exp of the window's query rows (left out where it is
// given), then column sums, group reduction and pooling in one pass. The arithmetic is that of
// score/snapkv.hpp. Row tiles never cross query heads, so any group size works.
#pragma once
#include <cstdint>

#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"
#include "kvevict/cuda/detail/tile.hpp"
#include "kvevict/score/group.hpp"
#include "kvevict/score/pooling.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

inline constexpr float log2_e = 1.4426950408889634f, lowest_float = -3.402823466e38f;
KVEVICT_HOST_DEVICE constexpr float minus_infinity() noexcept { return kvevict::detail::float_of(0xff800000u); }

// sum * 2^most.
struct LogSum {
  float most, sum;
};

// One layer. All pointers are device memory.
template <class T>
struct WindowArgs {
  const Rows<const T>* keys;            // [heads] of [tokens][dim]
  const Rows<const T>* queries;         // [heads * group] of [recorded][dim]
  const index_t* const* key_positions;  // [heads] of [tokens], ascending; null: row j has position j
  const index_t* query_positions;       // [recorded], ascending
  index_t heads, group, window, recorded;
  float scale;       // of the logits, in base 2: softmax scale * log2(e)
  const float* lse;  // [heads * group][recorded], natural logarithm; null: row_lse
  index_t* visible;  // [heads][window]: keys that a row sees
  LogSum* partial;   // [heads][splits][group * window]
  float* row_lse;    // [heads][group * window], base 2
  index_t splits;
  int steps, chunk_tiles;  // of walk_tiles

  float* out;  // [heads], with GroupReduction::none [heads * group], of [out_stride]
  std::int64_t out_stride;
  bool mean_rows, group_first;  // rows=mean; order=group-then-pool
  GroupReduction group_op;
  Pooling pool;
  float fill;             // score of columns that have none
  std::int32_t* largest;  // raised to the ordered key of the largest score; may be null

  KVEVICT_HOST_DEVICE index_t halo() const noexcept { return pool.kind == Pooling::Kind::none ? 0 : pool.kernel / 2; }
  // Query heads are added up before anything that is not linear.
  KVEVICT_HOST_DEVICE bool one_sum() const noexcept { return is_linear(group_op) && (pool.linear() || group_first); }
  // Rows of sums that a block keeps until they are pooled.
  KVEVICT_HOST_DEVICE index_t sum_rows() const noexcept {
    return one_sum() || (group_op == GroupReduction::max && group_first) ? 1 : group;
  }
};

// A row of a tile. It takes part in its query head's sums with exp2(logit - lse); the factor of the sums is in there.
struct alignas(16) WindowRow {
  float lse;
  index_t visible;  // tokens [0, visible) are seen; none by a row that only fills the tile
  int done;         // the query head that ends with this tile, or -1
};

// Shared memory, in this order; a multiple of 16 bytes each.
struct WindowShared {
  std::size_t pieces, rows, rest;
  KVEVICT_HOST_DEVICE std::size_t bytes() const noexcept { return pieces + rows + rest; }
};
template <class T>
KVEVICT_HOST_DEVICE int row_tiles_of(const WindowArgs<T>& args, index_t used) noexcept {
  return args.group * static_cast<int>(ceil_div(used, tile_rows));
}
template <class T>
KVEVICT_HOST_DEVICE WindowShared window_shared(const WindowArgs<T>& args, int blocks, std::size_t rest) noexcept {
  const auto tiles = static_cast<std::size_t>(row_tiles_of(args, args.window));
  return {static_cast<std::size_t>(args.chunk_tiles) * static_cast<std::size_t>(tile_pieces(blocks, 1)) * sizeof(Piece),
          tiles * tile_rows * sizeof(WindowRow), round_up<std::size_t>(rest, 16)};
}
template <class T>
KVEVICT_HOST_DEVICE WindowShared lse_shared(const WindowArgs<T>& args, int blocks, int warps) noexcept {
  const auto tiles = static_cast<std::size_t>(row_tiles_of(args, args.window));
  return window_shared(args, blocks, static_cast<std::size_t>(warps) * tiles * tile_rows * sizeof(LogSum));
}
template <class T>
KVEVICT_HOST_DEVICE WindowShared score_shared(const WindowArgs<T>& args, int blocks, int tiles, int warps) noexcept {
  return window_shared(args, blocks,
                       static_cast<std::size_t>(args.sum_rows()) * static_cast<std::size_t>(args.steps * warps) *
                           static_cast<std::size_t>(tiles * tile_tokens) * sizeof(float));
}

// Block x = head x: how many keys each window row sees.
template <class Cta, class T>
KVEVICT_DEVICE void count_visible(Cta& cta, const WindowArgs<T>& args) {
  const index_t head = cta.block_x();
  const auto tokens = static_cast<index_t>(args.keys[head].rows);
  const index_t used = tokens == 0 ? 0 : window_rows_used(args.window, tokens);
  for (index_t i = cta.thread(); i < used; i += cta.threads()) {
    const index_t at = args.query_positions[args.recorded - used + i];
    index_t low = 0, high = tokens;  // the first key past the row's position
    if (!args.key_positions) {
      low = at < tokens ? at + 1 : tokens;
    } else {
      const index_t* positions = args.key_positions[head];
      while (low < high) {
        const index_t middle = low + (high - low) / 2;
        if (positions[middle] <= at) low = middle + 1;
        else high = middle;
      }
    }
    args.visible[std::int64_t{head} * args.window + i] = low;
  }
}

// What both passes do alike.
template <class T, int Tiles, class Cta>
struct WindowProblem {
  Cta& cta;
  const WindowArgs<T>& args;
  index_t head, tokens, used;
  int tiles_per_q;  // row tiles of a query head
  WindowRow* rows;  // shared, [row_tiles * tile_rows]
  // for walk_tiles
  static constexpr int terms = 1;
  int row_tiles, chunk_tiles, steps;
  index_t first, end;

  KVEVICT_DEVICE WindowProblem(Cta& block, const WindowArgs<T>& a, index_t h, WindowRow* shared_rows)
      : cta(block),
        args(a),
        head(h),
        tokens(static_cast<index_t>(a.keys[h].rows)),
        used(tokens == 0 ? 0 : window_rows_used(a.window, tokens)),
        tiles_per_q(static_cast<int>(ceil_div(used, tile_rows))),
        rows(shared_rows),
        row_tiles(row_tiles_of(a, used)),
        chunk_tiles(a.chunk_tiles),
        steps(a.steps),
        first(0),
        end(0) {}

  // The window rows that a row of a tile stands for; past `used` there is none.
  KVEVICT_DEVICE index_t query_head(int tile) const { return tile / tiles_per_q; }
  KVEVICT_DEVICE index_t window_row(int tile, int row) const { return tile % tiles_per_q * tile_rows + row; }

  // factor_log2: logarithm of the factor that all sums get.
  KVEVICT_DEVICE void read_rows(bool with_lse, float factor_log2) {
    for (int r = cta.thread(); r < row_tiles * tile_rows; r += cta.threads()) {
      const int tile = r / tile_rows;
      const index_t q = query_head(tile), i = window_row(tile, r % tile_rows);
      WindowRow row{0.f, 0, (tile + 1) % tiles_per_q == 0 ? q : -1};
      if (i < used) {
        row.visible = args.visible[std::int64_t{head} * args.window + i];
        if (with_lse && args.lse)
          row.lse = log2_e * args.lse[(std::int64_t{head} * args.group + q) * args.recorded + args.recorded - used + i];
        else if (with_lse) row.lse = args.row_lse[(std::int64_t{head} * args.group + q) * args.window + i];
      }
      row.lse -= factor_log2;
      rows[r] = row;
    }
  }

  KVEVICT_DEVICE Piece row_piece(int tile, int row, int, int block, int t) const {
    const index_t i = window_row(tile, row);
    if (i >= used) return Piece{{0, 0, 0, 0}};
    const Rows<const T>& q = args.queries[std::int64_t{head} * args.group + query_head(tile)];
    return piece_row(q, args.recorded - used + i, t)[block];
  }
  KVEVICT_DEVICE PieceRow token_row(index_t token, int t) const {
    if (token < 0 || token >= end) return {};
    return piece_row(args.keys[head], token, t);  // read again for each step: its registers are needed meanwhile
  }
  KVEVICT_DEVICE Piece token_piece(const PieceRow& row, int block) const { return row[block]; }
};

// ---- first pass: log-sum-exp ----
template <class T, int Tiles, class Cta>
struct LseProblem : WindowProblem<T, Tiles, Cta> {
  using Base = WindowProblem<T, Tiles, Cta>;
  LogSum* sums;  // shared, of this warp: [row_tiles * tile_rows]; each row is kept by one lane

  KVEVICT_DEVICE LseProblem(Cta& block, const WindowArgs<T>& a, index_t h, WindowRow* shared_rows, LogSum* shared_sums)
      : Base(block, a, h, shared_rows), sums(shared_sums + block.warp() * Base::row_tiles * tile_rows) {
    for (int r = block.lane(); r < Base::row_tiles * tile_rows; r += warp_size) sums[r] = {lowest_float, 0.f};
  }

  KVEVICT_DEVICE void begin(index_t) {}
  KVEVICT_DEVICE void finish(index_t) {}
  KVEVICT_DEVICE void products(int tile, const float (&c)[Tiles][4], index_t token) {
    const int lane = this->cta.lane();
    KVEVICT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = tile * tile_rows + lane / 4 + 8 * half;
      const index_t sees = min(this->rows[row].visible, this->end) - (token + 2 * (lane % 4));
      float highest = lowest_float;
      KVEVICT_UNROLL
      for (int i = 0; i < 2 * Tiles; ++i)
        if (token_offset(i / 2, i & 1) < sees) highest = max(highest, c[i / 2][2 * half + (i & 1)] * this->args.scale);
      highest = max(highest, this->cta.shuffle_xor(highest, 1));
      highest = max(highest, this->cta.shuffle_xor(highest, 2));
      float sum = 0.f;
      KVEVICT_UNROLL
      for (int i = 0; i < 2 * Tiles; ++i)
        if (token_offset(i / 2, i & 1) < sees)
          sum += this->cta.exp2(c[i / 2][2 * half + (i & 1)] * this->args.scale - highest);
      sum += this->cta.shuffle_xor(sum, 1);
      sum += this->cta.shuffle_xor(sum, 2);
      if (lane % 4 == 0) sums[row] = add(this->cta, sums[row], {highest, sum});
    }
  }

  KVEVICT_DEVICE static LogSum add(const Cta& cta, LogSum a, LogSum b) {
    const float highest = max(a.most, b.most);
    return {highest, a.sum * cta.exp2(a.most - highest) + b.sum * cta.exp2(b.most - highest)};
  }
};

// Block (x, y) = (part of the tokens, head).
template <class T, int Blocks, int Tiles, class Cta>
KVEVICT_DEVICE void sum_exponentials(Cta& cta, const WindowArgs<T>& args, unsigned char* shared) {
  const WindowShared layout = lse_shared(args, Blocks, cta.warps());
  auto* rows = reinterpret_cast<WindowRow*>(shared + layout.pieces);
  auto* sums = reinterpret_cast<LogSum*>(shared + layout.pieces + layout.rows);
  LseProblem<T, Tiles, Cta> problem(cta, args, cta.block_y(), rows, sums);
  const index_t columns = args.steps * cta.warps() * (Tiles * tile_tokens);
  problem.first = cta.block_x() * columns;
  problem.end = min(problem.tokens, problem.first + columns);
  problem.read_rows(false, 0.f);
  if (problem.first < problem.end) walk_tiles<T, Blocks, Tiles>(cta, problem, reinterpret_cast<Piece*>(shared));
  cta.sync();
  LogSum* out = args.partial + (std::int64_t{problem.head} * args.splits + cta.block_x()) * args.group * args.window;
  for (int r = cta.thread(); r < problem.row_tiles * tile_rows; r += cta.threads()) {
    const index_t i = problem.window_row(r / tile_rows, r % tile_rows);
    if (i >= problem.used) continue;
    LogSum sum{lowest_float, 0.f};
    for (int w = 0; w < cta.warps(); ++w) sum = problem.add(cta, sum, sums[w * problem.row_tiles * tile_rows + r]);
    out[problem.query_head(r / tile_rows) * args.window + i] = sum;
  }
}

// Block x = head x: joins the parts, always in the same order.
template <class T, class Cta>
KVEVICT_DEVICE void join_exponentials(Cta& cta, const WindowArgs<T>& args) {
  const index_t head = cta.block_x(), rows = args.group * args.window;
  const auto tokens = static_cast<index_t>(args.keys[head].rows);
  const index_t used = tokens == 0 ? 0 : window_rows_used(args.window, tokens);
  for (index_t r = cta.thread(); r < rows; r += cta.threads()) {
    if (r % args.window >= used) continue;
    LogSum sum{lowest_float, 0.f};
    for (index_t s = 0; s < args.splits; ++s)
      sum = LseProblem<T, 1, Cta>::add(cta, sum, args.partial[(std::int64_t{head} * args.splits + s) * rows + r]);
    args.row_lse[std::int64_t{head} * rows + r] = sum.most + cta.log2(sum.sum);
  }
}

// ---- second pass: scores ----
template <class T, int Tiles, class Cta>
struct ScoreProblem : WindowProblem<T, Tiles, Cta> {
  using Base = WindowProblem<T, Tiles, Cta>;
  float* sums;  // shared, [sum_rows][columns]
  index_t columns;
  bool each_head;  // a row of sums per query head, or their maximum
  float column[Tiles][2];

  KVEVICT_DEVICE ScoreProblem(Cta& block, const WindowArgs<T>& a, index_t h, WindowRow* shared_rows, float* shared_sums)
      : Base(block, a, h, shared_rows), sums(shared_sums), columns(0), each_head(!a.one_sum()) {}

  // Of every probability: means over rows, and over query heads where these are added up at once.
  KVEVICT_DEVICE float factor() const {
    float out = 1.f;
    if (this->args.mean_rows) out /= static_cast<float>(this->used);
    if (!each_head && this->args.group_op == GroupReduction::mean) out /= static_cast<float>(this->args.group);
    return out;
  }
  KVEVICT_DEVICE void begin(index_t) {
    KVEVICT_UNROLL
    for (int i = 0; i < 2 * Tiles; ++i) column[i / 2][i & 1] = 0.f;
  }
  KVEVICT_DEVICE void products(int tile, const float (&c)[Tiles][4], index_t token) {
    const int lane = this->cta.lane();
    KVEVICT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const WindowRow row = this->rows[tile * tile_rows + lane / 4 + 8 * half];
      const index_t sees = row.visible - (token + 2 * (lane % 4));  // from the lane's first token on
      KVEVICT_UNROLL
      for (int i = 0; i < 2 * Tiles; ++i) {
        const float logit = c[i / 2][2 * half + (i & 1)] * this->args.scale;
        if (token_offset(i / 2, i & 1) < sees) column[i / 2][i & 1] += this->cta.exp2(logit - row.lse);
      }
    }
    const int done = this->rows[tile * tile_rows].done;
    if (each_head && done >= 0) store(done, token);
  }
  KVEVICT_DEVICE void finish(index_t token) {
    if (!each_head) store(0, token);
  }
  // Adds up the columns over the lanes that share them; one lane keeps each. Query heads with one row of sums: the
  // maximum.
  KVEVICT_DEVICE void store(index_t q, index_t token) {
    const int lane = this->cta.lane();
    const bool one_row = this->args.sum_rows() == 1, raise = one_row && q > 0;
    token += 2 * (lane % 4);
    float* to = sums + (one_row ? 0 : q * columns) + (token - this->first);
    const index_t low = lane < 4 ? -token : columns, room = this->end - token;
    KVEVICT_UNROLL
    for (int i = 0; i < 2 * Tiles; ++i) {
      const int at = token_offset(i / 2, i & 1);
      const float sum = sum_over_rows(this->cta, column[i / 2][i & 1]);
      column[i / 2][i & 1] = 0.f;
      if (low <= at && at < room) to[at] = raise ? max(to[at], sum) : sum;
    }
  }

  // One token's value after pooling.
  KVEVICT_DEVICE float pooled(index_t row, index_t at) const {
    const float* in = sums + row * columns + at;
    float out = in[0];
    for (index_t o = 1; o < 2 * this->args.halo() + 1; ++o)
      out = this->args.pool.kind == Pooling::Kind::max ? max(out, in[o]) : out + in[o];
    return this->args.pool.kind == Pooling::Kind::avg ? out / static_cast<float>(this->args.pool.kernel) : out;
  }
};

// Block (x, y) = (part of the tokens, head). Parts overlap by what pooling reads.
template <class T, int Blocks, int Tiles, class Cta>
KVEVICT_DEVICE void score_window(Cta& cta, const WindowArgs<T>& args, unsigned char* shared) {
  const WindowShared layout = score_shared(args, Blocks, Tiles, cta.warps());
  auto* rows = reinterpret_cast<WindowRow*>(shared + layout.pieces);
  auto* sums = reinterpret_cast<float*>(shared + layout.pieces + layout.rows);
  ScoreProblem<T, Tiles, Cta> problem(cta, args, cta.block_y(), rows, sums);
  const index_t halo = args.halo(), columns = args.steps * cta.warps() * (Tiles * tile_tokens);
  const index_t each = columns - 2 * halo, past = problem.tokens - problem.used, sum_rows = args.sum_rows();
  const index_t begin = cta.block_x() * each;
  problem.columns = columns;
  problem.first = begin - halo;
  problem.end = past;
  if (begin < past) {
    const float padding = args.pool.kind == Pooling::Kind::max ? minus_infinity() : 0.f;
    for (index_t i = cta.thread(); i < sum_rows * columns; i += cta.threads()) sums[i] = padding;
    problem.read_rows(true, cta.log2(problem.factor()));
    walk_tiles<T, Blocks, Tiles>(cta, problem, reinterpret_cast<Piece*>(shared));
    cta.sync();
  }
  const index_t out_rows = args.group_op == GroupReduction::none ? args.group : 1;
  float* out = args.out + std::int64_t{problem.head} * out_rows * args.out_stride;
  std::int32_t largest = 0;
  for (index_t i = cta.thread(); i < each && begin + i < problem.tokens; i += cta.threads()) {
    const bool scored = begin + i < past;
    for (index_t r = 0; r < out_rows; ++r) {
      float value = args.fill;
      if (scored) {
        value = problem.pooled(r, i);
        if (out_rows == 1)
          for (index_t q = 1; q < sum_rows; ++q)
            value =
                args.group_op == GroupReduction::max ? max(value, problem.pooled(q, i)) : value + problem.pooled(q, i);
        if (out_rows == 1 && sum_rows > 1 && args.group_op == GroupReduction::mean)
          value /= static_cast<float>(args.group);
        largest = max(largest, ordered_key(value));
      }
      out[r * args.out_stride + begin + i] = value;
    }
  }
  if (!args.largest) return;
  largest = warp_max(cta, largest);
  if (cta.lane() == 0) cta.largest_global(*args.largest, largest);
}

// protect=score: the window and the sinks get the layer's largest score + 1. Block y = output row y.
template <class T, class Cta>
KVEVICT_DEVICE void fill_protected(Cta& cta, const WindowArgs<T>& args, index_t sinks) {
  const index_t out_rows = args.group_op == GroupReduction::none ? args.group : 1;
  const auto tokens = static_cast<index_t>(args.keys[cta.block_y() / out_rows].rows);
  const index_t used = tokens == 0 ? 0 : window_rows_used(args.window, tokens);
  const float value = score_of_key(*args.largest) + 1.f;
  float* out = args.out + std::int64_t{cta.block_y()} * args.out_stride;
  for (index_t i = cta.thread(); i < used; i += cta.threads()) out[tokens - used + i] = value;
  for (index_t i = cta.thread(); i < min(sinks, tokens); i += cta.threads()) out[i] = value;
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
