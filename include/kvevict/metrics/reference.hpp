// Attention in plain words: for each query the visible rows, their logits, the softmax, the weighted sum of the values,
// in double. What tests compare everything else with; metrics/exact_attention.hpp computes the same faster.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/metrics/attention_query.hpp"

namespace kvevict::inline KVEVICT_ABI {

// softmax(scale * <q, k>) over the visible rows, times the values. A query sees a row if the row's position is at most
// its own and the row is kept; a query that sees nothing gets zeros. Throws std::invalid_argument, naming the layer, on
// shapes that do not fit. O(q_heads * queries * rows * (head_dim_k + head_dim_v)).
template <KVCacheView C, CacheElement Q>
requires(C::memory_space::host) AttentionResult
    reference_attention(const C& cache, index_t layer, const AttentionQueries<Q>& queries, double scale,
                        const AttentionOptions<typename C::element_type>& options = {}) {
  detail::check_attention(cache, layer, queries, options);
  const CacheShape s = cache.shape();
  const auto& local = options.local;
  AttentionResult out = detail::sized_result(s, queries);
  for (std::size_t q_head = 0, at = 0; q_head < out.probabilities.size(); ++q_head) {
    const auto head = q_head / static_cast<std::size_t>(s.group());
    const auto h = static_cast<index_t>(head), tokens = cache.tokens(layer, h);
    const index_t rows = tokens + static_cast<index_t>(local.positions.size());
    const auto keys = cache.keys(layer, h), values = cache.values(layer, h);
    const auto key = [&](index_t r, index_t c) {
      return static_cast<double>(to_float(r < tokens ? keys.at(r, c) : local.keys[head].at(r - tokens, c)));
    };
    const auto value = [&](index_t r, index_t c) {
      return static_cast<double>(to_float(r < tokens ? values.at(r, c) : local.values[head].at(r - tokens, c)));
    };
    const auto visible = [&](index_t r, index_t query_position) {
      if (r >= tokens) return local.positions[static_cast<std::size_t>(r - tokens)] <= query_position;
      if (cache.positions(layer, h)[static_cast<std::size_t>(r)] > query_position) return false;
      if (!options.keep) return true;
      const auto keep = options.keep->head(h);
      return std::find(keep.begin(), keep.end(), r) != keep.end();
    };
    for (index_t i = 0; i < out.queries; ++i, ++at) {
      std::vector<double> weights(static_cast<std::size_t>(rows), -std::numeric_limits<double>::infinity());
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (index_t r = 0; r < rows; ++r) {
        if (!visible(r, queries.positions[static_cast<std::size_t>(i)])) continue;
        double product = 0;
        for (index_t c = 0; c < s.head_dim_k; ++c)
          product += static_cast<double>(to_float(queries.rows[q_head].at(i, c))) * key(r, c);
        weights[static_cast<std::size_t>(r)] = scale * product;
        largest = std::max(largest, scale * product);
      }
      for (double& w : weights) sum += w = std::isinf(largest) ? 0 : std::exp(w - largest);
      for (double& w : weights) w = sum > 0 ? w / sum : 0;
      for (index_t c = 0; c < s.head_dim_v; ++c)
        for (index_t r = 0; r < rows; ++r)
          out.output[at * static_cast<std::size_t>(s.head_dim_v) + static_cast<std::size_t>(c)] +=
              weights[static_cast<std::size_t>(r)] * value(r, c);
      out.lse[at] = sum > 0 ? largest + std::log(sum) : -std::numeric_limits<double>::infinity();
      out.probabilities[q_head].insert(out.probabilities[q_head].end(), weights.begin(), weights.end());
    }
  }
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
