// Exact attention of a few or many queries over the rows of a cache, tile by tile with a running softmax: no matrix of
// queries x keys is ever stored, the cost is proportional to the rows that exist, and heads may differ in length. A
// query's result depends on the rows that it sees and their order alone; how queries are grouped, and how many threads
// run, changes no bit. (Running softmax: Milakov and Gimelshein 2018, arXiv 1805.02867.)
#pragma once
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/vector.hpp"
#include "kvevict/model/packed.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Keys and values that queries look at: one span entry per KV head. Query i sees rows [first[i], min(rows, i + offset +
// 1)), where offset is rows - queries for rows that end with the queries' own (causal), and `whole` if every row is
// visible.
template <CacheElement T>
struct AttendedRows {
  enum class Visible { causal, whole, local };  // local: row i is query i's own, so that offset is 0

  std::span<const Rows<const T>> keys, values;  // [kv_heads]
  Visible visible = Visible::causal;
  std::span<const index_t> first;  // [queries], or empty: from row 0
};

namespace kernel {

inline constexpr index_t key_tile = 128;  // keys a tile holds; a multiple of `panel` on every instruction set

constexpr index_t padded(index_t n, index_t to) noexcept { return (n + to - 1) / to * to; }

// One block of query rows of one KV head: what the running softmax carries from tile to tile.
struct AttentionBlock {
  index_t rows, group, depth_k, width_v;  // rows = queries * group; width_v: head_dim_v padded to a panel
  float *queries, *out, *scores, *keys, *values, *top, *sum;

  static std::size_t floats(index_t rows, index_t depth_k, index_t width_v) noexcept {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(depth_k + width_v + key_tile + 2) +
           static_cast<std::size_t>(panel) * static_cast<std::size_t>(depth_k) +
           static_cast<std::size_t>(key_tile) * static_cast<std::size_t>(width_v) + 6 * 16;
  }
  AttentionBlock(float* memory, index_t most_rows, index_t g, index_t dk, index_t wv) noexcept
      : rows(0), group(g), depth_k(dk), width_v(wv) {
    const auto take = [&](std::int64_t n) { return std::exchange(memory, memory + (n + 15) / 16 * 16); };
    queries = take(std::int64_t{most_rows} * dk);
    out = take(std::int64_t{most_rows} * wv);
    scores = take(std::int64_t{most_rows} * key_tile);
    keys = take(std::int64_t{panel} * dk);
    values = take(std::int64_t{key_tile} * wv);
    top = take(most_rows);
    sum = take(most_rows);
  }
};

// Keys [first, first + count) as panels [key / panel][dim][panel]; missing keys of the last panel are zero.
template <class T>
void pack_keys(const Rows<const T>& keys, index_t first, index_t count, index_t dims, float* out) {
  for (index_t p = 0; p < count; p += panel, out += panel * dims) {
    const index_t width = std::min(panel, count - p);
    index_t done = 0;  // dimensions
    if constexpr (std::same_as<T, float>) {
      // A step of decoding packs keys for one query: squares are transposed in registers.
      if (width == panel && keys.col_stride == 1)
        for (constexpr auto lanes = static_cast<index_t>(simd::width); done + lanes <= dims; done += lanes)
          for (index_t j = 0; j < panel; j += lanes) {
            simd::Vec square[simd::width];
#pragma GCC unroll 16
            for (index_t i = 0; i < lanes; ++i) square[i] = simd::load(keys.row(first + p + j + i) + done);
            simd::transpose(square);
#pragma GCC unroll 16
            for (index_t i = 0; i < lanes; ++i) simd::store(square[i], out + (done + i) * panel + j);
          }
    }
    if (width < panel) std::fill_n(out, panel * dims, 0.f);
    for (index_t j = 0; j < width; ++j) {
      const T* row = keys.row(first + p + j);
      for (index_t c = done; c < dims; ++c) out[c * panel + j] = to_float(row[c * keys.col_stride]);
    }
  }
}

template <class T>
void pack_values(const Rows<const T>& values, index_t first, index_t count, index_t dims, index_t width, float* out) {
  for (index_t r = 0; r < count; ++r, out += width) {
    const T* row = values.row(first + r);
    for (index_t c = 0; c < dims; ++c) out[c] = to_float(row[c * values.col_stride]);
    std::fill(out + dims, out + width, 0.f);
  }
}

// scores of one row [key_tile] become probabilities relative to the running maximum; what was summed so far is scaled.
inline void update_softmax(float* scores, float* out, index_t width_v, float& max_score, float& mass) {
  using namespace simd;
  constexpr auto lanes = static_cast<index_t>(width);
  Vec highest = load(scores);
  for (index_t c = lanes; c < key_tile; c += lanes) highest = max(load(scores + c), highest);
  const float tile_max = max_of(highest);
  if (tile_max == -std::numeric_limits<float>::infinity()) {  // this row sees nothing of the tile
    std::fill_n(scores, key_tile, 0.f);
    return;
  }
  if (tile_max > max_score) {
    const Vec shrink = exp(set(max_score - tile_max));
    for (index_t c = 0; c < width_v; c += lanes) store(mul(load(out + c), shrink), out + c);
    mass *= first(shrink);
    max_score = tile_max;
  }
  Vec total = zero();
  for (index_t c = 0; c < key_tile; c += lanes) {
    const Vec e = exp(sub(load(scores + c), set(max_score)));
    total = add(total, e);
    store(e, scores + c);
  }
  mass += sum(total);
}

// Lets the block's queries [query, query + rows / group) see one part's rows of KV head `head`. `queries`: of the call.
template <class T>
void attend_part(AttentionBlock& block, const AttendedRows<T>& part, index_t head, index_t query, index_t queries) {
  using Visible = typename AttendedRows<T>::Visible;
  const auto& keys = part.keys[static_cast<std::size_t>(head)];
  const auto& values = part.values[static_cast<std::size_t>(head)];
  const auto total = static_cast<index_t>(keys.rows);
  const index_t offset = part.visible == Visible::causal ? total - queries : 0, count = block.rows / block.group;
  const auto end_of = [&](index_t i) {
    return part.visible == Visible::whole ? total : std::min(total, i + offset + 1);
  };
  const auto first_of = [&](index_t i) { return part.first.empty() ? 0 : part.first[static_cast<std::size_t>(i)]; };
  const index_t end = end_of(query + count - 1);
  index_t begin = end;
  for (index_t i = query; i < query + count; ++i) begin = std::min(begin, first_of(i));
  const bool in_place =
      std::same_as<T, float> && values.blocks == nullptr && values.col_stride == 1 && values.cols == block.width_v;
  for (index_t k = begin / key_tile * key_tile; k < end; k += key_tile) {
    const index_t width = std::min(key_tile, end - k);
    for (index_t p = 0; p < width; p += panel) {  // a panel is used at once, out of the first-level cache
      pack_keys(keys, k + p, std::min(panel, width - p), block.depth_k, block.keys);
      multiply_panel(block.rows, block.queries, block.depth_k, block.keys, panel, block.depth_k, block.scores + p,
                     key_tile, false);
    }
    for (index_t r = 0; r < block.rows; ++r) {
      const index_t i = query + r / block.group;
      float* row = block.scores + r * key_tile;
      const index_t from = std::clamp(first_of(i) - k, 0, key_tile), to = std::clamp(end_of(i) - k, from, key_tile);
      std::fill(row, row + from, -std::numeric_limits<float>::infinity());
      std::fill(row + to, row + key_tile, -std::numeric_limits<float>::infinity());
      update_softmax(row, block.out + r * block.width_v, block.width_v, block.top[r], block.sum[r]);
    }
    const float* v = block.values;
    std::int64_t stride = block.width_v;
    if constexpr (std::same_as<T, float>) {
      if (in_place) v = values.row(k), stride = values.row_stride;
    }
    if (!in_place) pack_values(values, k, width, values.cols, block.width_v, block.values);
    for (index_t c = 0; c < block.width_v; c += panel)
      multiply_panel(block.rows, block.scores, key_tile, v + c, stride, width, block.out + c, block.width_v, true);
  }
}

}  // namespace kernel

// out [n][q_heads * head_dim_v] = softmax(scale q K^T) V for queries [n][q_heads * head_dim_k], over all parts
// together. Every query must see at least one row. lse, [q_heads][n] or null, receives the log-sum-exp of each row's
// scores. Scratch per thread is a few hundred KiB, whatever the number of rows. O(rows seen * head_dim).
template <class... T>
void streaming_attention(const host_exec& exec, const CacheShape& shape, float scale, Matrix<const float> queries,
                         Matrix<float> out, float* lse, const AttendedRows<T>&... parts) {
  const index_t n = queries.rows, group = shape.group(), dk = shape.head_dim_k, dv = shape.head_dim_v;
  const index_t width_v = kernel::padded(dv, kernel::panel);
  // About 96 rows share a packed key tile, and there are at least two blocks per thread where queries allow it.
  const index_t fair =
      std::max<index_t>(1, static_cast<index_t>(std::int64_t{n} * shape.kv_heads / (2 * exec.threads)));
  const index_t per_block = std::clamp<index_t>(std::min(96 / group, fair), 1, std::max<index_t>(n, 1));
  const index_t blocks = (n + per_block - 1) / per_block, most_rows = per_block * group;
  const std::size_t scratch = kernel::AttentionBlock::floats(most_rows, dk, width_v) * sizeof(float);
  parallel_for(exec, std::int64_t{blocks} * shape.kv_heads, scratch,
               [&](std::int64_t item, std::span<std::byte> memory) {
                 // Late queries see most rows: they go first, so that threads finish together.
                 const index_t query = (blocks - 1 - static_cast<index_t>(item / shape.kv_heads)) * per_block;
                 const auto head = static_cast<index_t>(item % shape.kv_heads);
                 kernel::AttentionBlock block(reinterpret_cast<float*>(memory.data()), most_rows, group, dk, width_v);
                 block.rows = std::min(per_block, n - query) * group;
                 for (index_t r = 0; r < block.rows; ++r) {
                   const float* q = queries.row(query + r / group) + (head * group + r % group) * dk;
                   for (index_t c = 0; c < dk; ++c) block.queries[r * dk + c] = q[c] * scale;
                   block.top[r] = -std::numeric_limits<float>::infinity();
                   block.sum[r] = 0;
                 }
                 std::fill_n(block.out, std::int64_t{block.rows} * width_v, 0.f);
                 (kernel::attend_part(block, parts, head, query, n), ...);
                 for (index_t r = 0; r < block.rows; ++r) {
                   const index_t i = query + r / group, q_head = head * group + r % group;
                   const float inverse = 1 / block.sum[r];
                   float* o = out.row(i) + q_head * dv;
                   for (index_t c = 0; c < dv; ++c) o[c] = block.out[r * width_v + c] * inverse;
                   if (lse) lse[std::int64_t{q_head} * n + i] = block.top[r] + std::log(block.sum[r]);
                 }
               });
}

}  // namespace kvevict::inline KVEVICT_ABI
