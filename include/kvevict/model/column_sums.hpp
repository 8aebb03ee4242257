// Column sums of the causal attention: how much every token was looked at by all tokens (H2O, observed attention). From
// queries, keys and the log-sum-exp of each row, tile by tile, so that no matrix of tokens x tokens exists.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/vector.hpp"
#include "kvevict/model/attention.hpp"
#include "kvevict/model/packed.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Adds to sums [q_heads][width] the attention of queries [n][q_heads * head_dim_k], the newest of keys [kv_heads]
// [rows][head_dim_k]; lse [q_heads][n]. Each query sees the rows up to its own. O(n * rows * head_dim_k * q_heads).
inline void add_column_sums(const host_exec& exec, const CacheShape& shape, float scale, Matrix<const float> queries,
                            std::span<const Rows<const float>> keys, const float* lse, Matrix<double> sums) {
  constexpr index_t tile = kernel::key_tile, block = 48;
  const index_t n = queries.rows, d = shape.head_dim_k;
  const auto rows = static_cast<index_t>(keys[0].rows);
  const index_t tiles = (rows + tile - 1) / tile;
  const std::size_t scratch = sizeof(float) * static_cast<std::size_t>(tile * d + block * d + block * tile);
  parallel_for(exec, std::int64_t{tiles} * shape.q_heads, scratch, [&](std::int64_t item, std::span<std::byte> memory) {
    const auto q_head = static_cast<index_t>(item / tiles), k = static_cast<index_t>(item % tiles) * tile;
    const index_t width = std::min(tile, rows - k);
    auto* packed = reinterpret_cast<float*>(memory.data());
    float *scaled = packed + tile * d, *scores = scaled + block * d;
    kernel::pack_keys(keys[static_cast<std::size_t>(q_head / shape.group())], k, width, d, packed);
    // Query i sees rows up to rows - n + i: earlier ones miss this tile.
    for (index_t first = std::max<index_t>(0, k - (rows - n)); first < n; first += block) {
      const index_t count = std::min(block, n - first);
      for (index_t r = 0; r < count; ++r)
        for (index_t c = 0; c < d; ++c) scaled[r * d + c] = queries.at(first + r, q_head * d + c) * scale;
      for (index_t p = 0; p < width; p += kernel::panel)
        kernel::multiply_panel(count, scaled, d, packed + p * d, kernel::panel, d, scores + p, tile, false);
      for (index_t r = 0; r < count; ++r) {
        const index_t i = first + r;
        float* s = scores + r * tile;
        std::fill(s + std::clamp(rows - n + i + 1 - k, 0, width), s + tile, -std::numeric_limits<float>::infinity());
        const auto shift = simd::set(lse[std::int64_t{q_head} * n + i]);
        for (index_t c = 0; c < tile; c += static_cast<index_t>(simd::width))
          simd::store(simd::exp(simd::sub(simd::load(s + c), shift)), s + c);
        for (index_t c = 0; c < width; ++c) sums.at(q_head, k + c) += static_cast<double>(s[c]);
      }
    }
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
