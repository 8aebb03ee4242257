// Exact attention over any host cache, in double: what an engine would compute from these rows if rounding were free,
// by matrix products over blocks of queries. The truth of the metrics; reference.hpp says the same in plain loops.
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
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/metrics/attention_query.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// Register tile of the product below: rows of A, columns of B.
inline constexpr std::int64_t tile_rows = 4, tile_cols = 8;

constexpr std::size_t padded(std::int64_t count, std::int64_t tile) {
  return static_cast<std::size_t>((count + tile - 1) / tile * tile);
}

// A vector of the machine; wider ones are split badly by compilers. The vector layer has floats alone, and this product
// is the only one in double.
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

// Makes of a row of logits weights that sum to 1 over the visible columns and are 0 elsewhere; returns the
// log-sum-exp. Without a visible column all weights are 0.
inline double masked_softmax(double* logits, std::span<const index_t> positions, index_t query_position, double scale) {
  double largest = -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < positions.size(); ++j) {
    logits[j] *= scale;
    if (positions[j] <= query_position) largest = std::max(largest, logits[j]);
  }
  double sum = 0;
  for (std::size_t j = 0; j < positions.size(); ++j) {
    logits[j] = positions[j] <= query_position ? std::exp(logits[j] - largest) : 0.0;
    sum += logits[j];
  }
  if (sum == 0) return -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j < positions.size(); ++j) logits[j] /= sum;
  return largest + std::log(sum);
}

}  // namespace detail

// What reference_attention() computes, fast. Keys, queries and values must be finite. Throws std::invalid_argument,
// naming the layer, on shapes that do not fit. O(q_heads * queries * rows * (head_dim_k + head_dim_v)) time; working
// memory of one head's rows, widened, per thread. Bit-identical for any number of threads.
template <KVCacheView C, CacheElement Q>
requires(C::memory_space::host) AttentionResult
    exact_attention(const host_exec& exec, const C& cache, index_t layer, const AttentionQueries<Q>& queries,
                    double scale, const AttentionOptions<typename C::element_type>& options = {}) {
  using detail::padded;
  detail::check_attention(cache, layer, queries, options);
  const CacheShape s = cache.shape();
  const auto n_queries = static_cast<std::int64_t>(queries.positions.size());
  const auto n_local = options.local.positions.size();
  const auto d_k = static_cast<std::size_t>(s.head_dim_k), d_v = static_cast<std::size_t>(s.head_dim_v);
  AttentionResult out = detail::sized_result(s, queries);
  if (!options.probabilities) out.probabilities.clear();

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
