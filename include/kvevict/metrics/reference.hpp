// Exact attention over any host cache, in double: what an engine would compute from these rows if rounding were free.
// The oracle of tests and metrics. A query sees a row iff the row's position is at most its own (and the row is kept),
// so nothing depends on where a row lies in the cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/check_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Queries of one layer, post-RoPE.
template <CacheElement Q>
struct AttentionQueries {
  std::span<const Rows<const Q>> rows;  // [q_heads] of [queries][head_dim_k]
  std::span<const index_t> positions;   // [queries], any order
};

// Rows that follow the cache without being in it, such as the continuation of a dump. Empty by default.
template <CacheElement T>
struct LocalRows {
  std::span<const Rows<const T>> keys, values;  // [kv_heads] of [local][dim]
  std::span<const index_t> positions;           // [local], any order
};

template <CacheElement T>
struct AttentionOptions {
  LocalRows<T> local;
  const HeadRows* keep = nullptr;  // cache rows that may be seen; null: all of them
  bool probabilities = false;      // also return the softmax weights
};

struct AttentionResult {
  index_t queries = 0, head_dim_v = 0;
  std::vector<double> output;  // [q_heads][queries][head_dim_v]
  std::vector<double> lse;     // [q_heads][queries]: log of the sum of exp(logit); -inf: sees nothing
  std::vector<std::vector<double>> probabilities;  // [q_heads] of [queries][tokens of its head + local]

  std::span<const double> row(index_t q_head, index_t query) const {
    const auto d = static_cast<std::size_t>(head_dim_v);
    return std::span(output).subspan(
        (static_cast<std::size_t>(q_head) * static_cast<std::size_t>(queries) + static_cast<std::size_t>(query)) * d,
        d);
  }
};

namespace detail {

// Register tile of the product below: rows of A, columns of B.
inline constexpr std::int64_t tile_rows = 4, tile_cols = 8;

constexpr std::size_t padded(std::int64_t count, std::int64_t tile) {
  return static_cast<std::size_t>((count + tile - 1) / tile * tile);
}

// A vector of the machine; wider ones are split badly by compilers.
#if defined(__AVX512F__)
inline constexpr std::size_t double_lanes = 8;
#elif defined(__AVX__)
inline constexpr std::size_t double_lanes = 4;
#else
inline constexpr std::size_t double_lanes = 2;
#endif
using DoubleLanes [[gnu::vector_size(double_lanes * sizeof(double))]] = double;

// C [m][n] = A [m][k] * B [k][n], row-major, m and n multiples of the tile. Each sum runs in ascending k.
inline void tile_product(const double* a, std::size_t a_stride, const double* b, std::size_t b_stride, double* c,
                         std::size_t c_stride, std::size_t m, std::size_t n, std::size_t k) {
  constexpr std::size_t vectors = tile_cols / double_lanes;
  for (std::size_t j = 0; j < n; j += tile_cols)
    for (std::size_t i = 0; i < m; i += tile_rows) {
      DoubleLanes sum[tile_rows][vectors] = {};
      for (std::size_t l = 0; l < k; ++l)
        for (std::size_t v = 0; v < vectors; ++v) {
          DoubleLanes columns;
          std::memcpy(&columns, b + l * b_stride + j + v * double_lanes, sizeof columns);
          for (std::size_t r = 0; r < tile_rows; ++r) sum[r][v] += a[(i + r) * a_stride + l] * columns;
        }
      for (std::size_t r = 0; r < tile_rows; ++r) std::memcpy(c + (i + r) * c_stride + j, sum[r], sizeof sum[r]);
    }
}

// What one head shows to its queries, widened: kept cache rows, then local rows.
struct WideHead {
  std::size_t columns = 0, stride = 0, value_stride = 0;
  std::vector<double> keys_t;  // [head_dim_k][stride]
  std::vector<double> values;  // [columns][value_stride]
  std::vector<index_t> positions;
  std::vector<std::size_t> place;  // column in the result's probabilities

  template <class T>
  void add(const Rows<const T>& key_rows, const Rows<const T>& value_rows, std::int64_t r, index_t position,
           std::size_t to) {
    const std::size_t c = positions.size();
    for (index_t i = 0; i < key_rows.cols; ++i)
      keys_t[static_cast<std::size_t>(i) * stride + c] = to_float(key_rows.at(r, i));
    for (index_t i = 0; i < value_rows.cols; ++i)
      values[c * value_stride + static_cast<std::size_t>(i)] = to_float(value_rows.at(r, i));
    positions.push_back(position);
    place.push_back(to);
  }
};

// Turns a row of logits into weights that sum to 1 over the visible columns and are 0 elsewhere; returns the
// log-sum-exp. Without a visible column all weights are 0.
inline double masked_softmax(double* logits, std::span<const index_t> positions, index_t query_position, double scale) {
  double most = -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < positions.size(); ++j) {
    logits[j] *= scale;
    if (positions[j] <= query_position) most = std::max(most, logits[j]);
  }
  double sum = 0;
  for (std::size_t j = 0; j < positions.size(); ++j) {
    logits[j] = positions[j] <= query_position ? std::exp(logits[j] - most) : 0.0;
    sum += logits[j];
  }
  if (sum == 0) return -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < positions.size(); ++j) logits[j] /= sum;
  return most + std::log(sum);
}

template <class C, class Q>
void check_attention(const C& cache, index_t layer, const AttentionQueries<Q>& queries,
                     const LocalRows<typename C::element_type>& local) {
  const CacheShape s = cache.shape();
  if (layer < 0 || layer >= s.layers) fail_argument("attention: layer ", layer, " of ", s.layers);
  if (queries.rows.size() != static_cast<std::size_t>(s.q_heads))
    fail_argument("attention in layer ", layer, ": queries of ", queries.rows.size(), " heads; the model has ",
                  s.q_heads, " query heads");
  for (const auto& q : queries.rows)
    if (q.rows != static_cast<std::int64_t>(queries.positions.size()) || q.cols != s.head_dim_k)
      fail_argument("attention in layer ", layer, ": queries [", q.rows, "][", q.cols, "]; [", queries.positions.size(),
                    "][", s.head_dim_k, "] are needed");
  if (local.positions.empty()) return;
  const auto heads = static_cast<std::size_t>(s.kv_heads);
  if (local.keys.size() != heads || local.values.size() != heads)
    fail_argument("attention in layer ", layer, ": local rows of ", local.keys.size(), " and ", local.values.size(),
                  " heads; the cache has ", heads);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto rows = static_cast<std::int64_t>(local.positions.size());
    if (local.keys[h].rows != rows || local.values[h].rows != rows || local.keys[h].cols != s.head_dim_k ||
        local.values[h].cols != s.head_dim_v)
      fail_argument("attention in layer ", layer, ", head ", h, ": local rows [", local.keys[h].rows, "][",
                    local.keys[h].cols, "] and [", local.values[h].rows, "][", local.values[h].cols, "]; ", rows,
                    " of ", s.head_dim_k, " and ", s.head_dim_v, " are needed");
  }
}

}  // namespace detail

// Attention of the given queries over one layer: softmax(scale * <q, k>) over the visible rows, times the values.
// A query that sees nothing gets zeros. Keys, queries and values must be finite. Throws std::invalid_argument, naming
// the layer, on shapes that do not fit. O(q_heads * queries * rows * (head_dim_k + head_dim_v)) time; working memory of
// one head's rows, widened, per thread. Bit-identical for any number of threads.
template <KVCacheView C, CacheElement Q>
requires(C::memory_space::host) AttentionResult
    attend(const host_exec& exec, const C& cache, index_t layer, const AttentionQueries<Q>& queries, double scale,
           const AttentionOptions<typename C::element_type>& options = {}) {
  using detail::padded;
  detail::check_attention(cache, layer, queries, options.local);
  const CacheShape s = cache.shape();
  if (options.keep) {
    std::vector<index_t> tokens;
    for (index_t h = 0; h < s.kv_heads; ++h) tokens.push_back(cache.tokens(layer, h));
    check_keep(layer, tokens, *options.keep);
  }
  const auto n_queries = static_cast<std::int64_t>(queries.positions.size());
  const auto n_local = options.local.positions.size();
  const auto d_k = static_cast<std::size_t>(s.head_dim_k), d_v = static_cast<std::size_t>(s.head_dim_v);
  AttentionResult out;
  out.queries = static_cast<index_t>(n_queries);
  out.head_dim_v = s.head_dim_v;
  out.lse.resize(static_cast<std::size_t>(s.q_heads) * static_cast<std::size_t>(n_queries));
  out.output.resize(out.lse.size() * d_v);
  if (options.probabilities) out.probabilities.resize(static_cast<std::size_t>(s.q_heads));

  parallel_for(exec, s.kv_heads, [&](std::int64_t head) {
    const auto h = static_cast<index_t>(head);
    const auto tokens = static_cast<std::size_t>(cache.tokens(layer, h));
    std::vector<index_t> kept;
    if (options.keep) {
      const auto keep = options.keep->head(h);
      kept.assign(keep.begin(), keep.end());
    } else {
      kept.resize(tokens);
      std::iota(kept.begin(), kept.end(), 0);
    }
    detail::WideHead wide;
    wide.columns = kept.size() + n_local;
    wide.stride = padded(static_cast<std::int64_t>(wide.columns), detail::tile_cols);
    wide.value_stride = padded(s.head_dim_v, detail::tile_cols);
    wide.keys_t.assign(d_k * wide.stride, 0.0);
    wide.values.assign(wide.columns * wide.value_stride, 0.0);
    const auto keys = cache.keys(layer, h), values = cache.values(layer, h);
    const auto positions = cache.positions(layer, h);
    for (const index_t r : kept)
      wide.add(keys, values, r, positions[static_cast<std::size_t>(r)], static_cast<std::size_t>(r));
    for (std::size_t r = 0; r < n_local; ++r)
      wide.add(options.local.keys[static_cast<std::size_t>(h)], options.local.values[static_cast<std::size_t>(h)],
               static_cast<std::int64_t>(r), options.local.positions[r], tokens + r);

    constexpr std::int64_t block = 64;  // queries at a time: bounds the weights that are held at once
    std::vector<double> q(block * d_k), weights(block * wide.stride), o(block * wide.value_stride);
    for (index_t g = 0; g < s.group(); ++g) {
      const auto q_head = static_cast<std::size_t>(h * s.group() + g);
      const Rows<const Q>& rows = queries.rows[q_head];
      if (options.probabilities)
        out.probabilities[q_head].assign(static_cast<std::size_t>(n_queries) * (tokens + n_local), 0.0);
      for (std::int64_t first = 0; first < n_queries; first += block) {
        const auto count = static_cast<std::size_t>(std::min(block, n_queries - first));
        const std::size_t m = padded(static_cast<std::int64_t>(count), detail::tile_rows);
        for (std::size_t i = 0; i < count; ++i)
          for (std::size_t c = 0; c < d_k; ++c)
            q[i * d_k + c] = to_float(rows.at(first + static_cast<std::int64_t>(i), static_cast<std::int64_t>(c)));
        detail::tile_product(q.data(), d_k, wide.keys_t.data(), wide.stride, weights.data(), wide.stride, m,
                             wide.stride, d_k);
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t query = static_cast<std::size_t>(first) + i;
          out.lse[q_head * static_cast<std::size_t>(n_queries) + query] =
              detail::masked_softmax(weights.data() + i * wide.stride, wide.positions, queries.positions[query], scale);
          if (options.probabilities)
            for (std::size_t j = 0; j < wide.columns; ++j)
              out.probabilities[q_head][query * (tokens + n_local) + wide.place[j]] = weights[i * wide.stride + j];
        }
        detail::tile_product(weights.data(), wide.stride, wide.values.data(), wide.value_stride, o.data(),
                             wide.value_stride, m, wide.value_stride, wide.columns);
        for (std::size_t i = 0; i < count; ++i)
          std::copy_n(o.data() + i * wide.value_stride, d_v,
                      out.output.data() +
                          (q_head * static_cast<std::size_t>(n_queries) + static_cast<std::size_t>(first) + i) * d_v);
      }
    }
  });
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
