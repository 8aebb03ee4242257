// What an eviction costs, measured with the queries of a continuation that the policy has not seen:
//   mass_recall   softmax over the prompt rows alone; the mass on kept rows, mean over queries, q_heads and layers;
//   output_error  |o_full - o_kept| / |o_full| of the attention output, continuation rows visible as they are; same
//   mean; oracle_gap    mass_recall of the best selection under the same total, minus this one.
// The truth of a layer is computed once; each policy then costs a sum (recall) or one attention over its small cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/metrics/exact_attention.hpp"
#include "kvevict/metrics/finite.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What the continuation sees in one layer of the full cache.
struct LayerTruth {
  index_t layer = 0, q_heads = 0, queries = 0;
  std::vector<std::vector<double>> mass;  // [kv_heads][tokens]: softmax mass over prompt rows, summed over the queries
                                          // of the head's group
  AttentionResult full;                   // output with the continuation rows visible
};

// Measures the full cache of one layer with the continuation's queries; `local` are the continuation's own rows. Throws
// std::domain_error for the first value that is no finite number (check_finite).
template <KVCacheView C, CacheElement Q>
LayerTruth layer_truth(const host_exec& exec, const C& cache, index_t layer, const AttentionQueries<Q>& queries,
                       double scale, const LocalRows<typename C::element_type>& local) {
  using T = typename C::element_type;
  if (queries.positions.empty())
    fail_argument("metrics: layer ", layer, " has no continuation queries to measure with");
  check_finite(cache, layer, queries, local);
  const CacheShape s = cache.shape();
  LayerTruth out;
  out.layer = layer;
  out.q_heads = s.q_heads;
  out.queries = static_cast<index_t>(queries.positions.size());
  AttentionOptions<T> prompt;
  prompt.probabilities = true;
  const AttentionResult seen = exact_attention(exec, cache, layer, queries, scale, prompt);
  for (index_t h = 0; h < s.kv_heads; ++h) {
    const auto tokens = static_cast<std::size_t>(cache.tokens(layer, h));
    std::vector<double> mass(tokens, 0.0);
    for (index_t g = 0; g < s.group(); ++g) {
      const auto& p = seen.probabilities[static_cast<std::size_t>(h * s.group() + g)];
      for (std::size_t i = 0; i < p.size(); ++i) mass[i % tokens] += p[i];
    }
    out.mass.push_back(std::move(mass));
  }
  AttentionOptions<T> all;
  all.local = local;
  out.full = exact_attention(exec, cache, layer, queries, scale, all);
  return out;
}

// Share of the attention on prompt rows that falls on the kept ones, mean over queries and q_heads. O(kept rows).
inline double mass_recall(const LayerTruth& truth, const HeadRows& keep) {
  std::vector<index_t> tokens;
  for (const auto& mass : truth.mass) tokens.push_back(static_cast<index_t>(mass.size()));
  check_keep(truth.layer, tokens, keep);
  double sum = 0;
  for (std::size_t h = 0; h < tokens.size(); ++h)
    for (const index_t r : keep.head(static_cast<index_t>(h))) sum += truth.mass[h][static_cast<std::size_t>(r)];
  return sum / (static_cast<double>(truth.q_heads) * truth.queries);
}

// Relative L2 error of the attention output over the compacted cache, mean over queries and q_heads. An output that was
// zero counts 0 if it still is, else 1. An output that is no number makes the result none.
template <KVCacheView C, CacheElement Q>
double output_error(const host_exec& exec, const LayerTruth& truth, const C& compacted,
                    const AttentionQueries<Q>& queries, double scale,
                    const LocalRows<typename C::element_type>& local) {
  AttentionOptions<typename C::element_type> options;
  options.local = local;
  const AttentionResult kept = exact_attention(exec, compacted, truth.layer, queries, scale, options);
  if (kept.output.size() != truth.full.output.size())
    fail_argument("output_error: layer ", truth.layer, " was measured with ", truth.queries, " queries, not ",
                  kept.queries);
  double sum = 0;
  for (index_t q_head = 0; q_head < truth.q_heads; ++q_head)
    for (index_t i = 0; i < truth.queries; ++i) {
      const auto a = truth.full.row(q_head, i), b = kept.row(q_head, i);
      double error = 0, norm = 0;
      for (std::size_t c = 0; c < a.size(); ++c) {
        error += (a[c] - b[c]) * (a[c] - b[c]);
        norm += a[c] * a[c];
      }
      sum += error == 0 ? 0.0 : norm == 0 && error > 0 ? 1.0 : std::sqrt(error / norm);
    }
  return sum / (static_cast<double>(truth.q_heads) * truth.queries);
}

// Largest mass_recall, mean over the layers, that any selection of `total` rows reaches. mass_recall is linear in what
// is kept, so this is the sum of the largest masses of all layers and heads together; heads may stay empty. O(rows).
inline double best_mass_recall(std::span<const LayerTruth> layers, std::int64_t total) {
  std::vector<double> all;
  for (const LayerTruth& layer : layers)
    for (const auto& mass : layer.mass)
      for (const double m : mass) all.push_back(m / (static_cast<double>(layer.q_heads) * layer.queries));
  if (total < 0) fail_argument("best_mass_recall: ", total, " rows");
  const auto kept = std::min(static_cast<std::size_t>(total), all.size());
  std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), all.end(), std::greater<>());
  const double sum = std::accumulate(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), 0.0);
  return layers.empty() ? 0.0 : sum / static_cast<double>(layers.size());
}

// How far a selection of `total` rows with this recall (mean over the layers) stays behind the best one.
inline double oracle_gap(std::span<const LayerTruth> layers, std::int64_t total, double recall) {
  return best_mass_recall(layers, total) - recall;
}

}  // namespace kvevict::inline KVEVICT_ABI
