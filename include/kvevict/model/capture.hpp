// A sink that turns a forward pass into what scorers look at: one LayerObservation per layer, as soon as the layer's
// rows are in the cache. Recorder, layer-by-layer eviction and evaluation share it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/model/column_sums.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/query_statistics.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What to keep of a pass beyond keys, values and positions.
struct CaptureOptions {
  index_t window = 0;            // newest query rows, with their log-sum-exp; at most all of them
  bool statistics = false;       // q_mean and q_cov of the tokens from statistics_first on
  index_t statistics_first = 4;  // the published Expected Attention leaves out 4 sinks
  bool column_sums = false;      // attn_sum
  bool output_projection = false;

  // Adds what a scorer needs.
  void add(Needs needs, index_t window_rows) {
    window = std::max(window, window_rows);
    statistics = statistics || includes_need(needs, Needs::q_stats);
    column_sums = column_sums || includes_need(needs, Needs::attn_sum);
    output_projection = output_projection || includes_need(needs, Needs::o_proj);
  }
};

// on_layer(const LayerObservation<float>&) may compact the layer. `tokens`: of the feed() that this sink goes to, into
// an empty cache. Everything is held for one layer at a time.
template <KVCacheView Cache, class OnLayer>
class LayerCapture {
 public:
  LayerCapture(const host_exec& exec, const Decoder& decoder, const Cache& cache, index_t tokens,
               CaptureOptions options, OnLayer on_layer)
      : exec_(exec),
        decoder_(decoder),
        cache_(cache),
        tokens_(tokens),
        options_(options),
        on_layer_(std::move(on_layer)) {
    const CacheShape s = decoder.cache_shape();
    window_ = std::min(options.window, tokens);
    // A prompt of nothing but sinks still has its last token to look at.
    options_.statistics_first = std::min(options.statistics_first, std::max(tokens - 1, 0));
    window_queries_.resize(static_cast<std::size_t>(s.q_heads) * static_cast<std::size_t>(window_) *
                           static_cast<std::size_t>(s.head_dim_k));
    lse_.resize(static_cast<std::size_t>(s.q_heads) * static_cast<std::size_t>(window_));
    if (options.statistics) statistics_ = QueryStatistics(s.q_heads, s.head_dim_k);
    if (options.column_sums) sums_.resize(static_cast<std::size_t>(s.q_heads) * static_cast<std::size_t>(tokens));
  }

  void before_rope(index_t, index_t first, Matrix<const float> queries) {
    if (!options_.statistics) return;
    if (first == 0) statistics_.clear();
    statistics_.add(exec_, queries, std::clamp(options_.statistics_first - first, 0, queries.rows));
  }

  void queries(index_t layer, index_t first, Matrix<const float> q, const float* lse) {
    const CacheShape s = decoder_.cache_shape();
    const index_t d = s.head_dim_k, begin = tokens_ - window_;
    for (index_t r = std::max(0, begin - first); r < q.rows; ++r)
      for (index_t h = 0; h < s.q_heads; ++h) {
        const std::int64_t row = std::int64_t{h} * window_ + first + r - begin;
        std::copy_n(q.row(r) + h * d, d, window_queries_.begin() + row * d);
        lse_[static_cast<std::size_t>(row)] = lse[std::int64_t{h} * q.rows + r];
      }
    if (!options_.column_sums) return;
    if (first == 0) std::fill(sums_.begin(), sums_.end(), 0.);
    std::vector<Rows<const float>> keys;
    for (index_t h = 0; h < s.kv_heads; ++h) keys.push_back(cache_.keys(layer, h));
    add_column_sums(exec_, s, decoder_.config().softmax_scale(), q, keys, lse,
                    {sums_.data(), s.q_heads, tokens_, tokens_});
  }

  void layer_done(index_t layer) {
    const CacheShape s = decoder_.cache_shape();
    auto seen = observe_layer(cache_, layer, decoder_.config().softmax_scale());
    seen.rope = decoder_.config().rope();
    const index_t d = s.head_dim_k;
    if (options_.statistics) statistics_.finish();
    for (index_t h = 0; h < s.q_heads; ++h) {
      if (window_ > 0)
        seen.window_queries.push_back(
            dense_rows(std::as_const(window_queries_).data() + std::int64_t{h} * window_ * d, window_, d));
      if (options_.statistics)
        seen.q_cov.push_back(dense_rows(statistics_.covariance().data() + std::int64_t{h} * d * d, d, d));
    }
    if (options_.statistics) seen.q_mean.push_back(dense_rows(statistics_.mean().data(), s.q_heads, d));
    if (window_ > 0) {
      seen.lse = lse_;
      positions_.clear();
      for (index_t r = 0; r < window_; ++r) positions_.push_back(tokens_ - window_ + r);
      seen.window_positions = positions_;
    }
    seen.q_stats_first = options_.statistics ? options_.statistics_first : 0;
    if (options_.column_sums) {
      column_sums_.assign(sums_.begin(), sums_.end());
      seen.attn_sum.push_back(dense_rows(std::as_const(column_sums_).data(), s.q_heads, tokens_));
    }
    if (options_.output_projection) {
      const PackedMatrix& o = decoder_.weights().layers[static_cast<std::size_t>(layer)].o;
      output_projection_.resize(static_cast<std::size_t>(o.outputs()) * static_cast<std::size_t>(o.inputs()));
      for (index_t r = 0; r < o.outputs(); ++r) o.row(r, output_projection_.data() + std::int64_t{r} * o.inputs());
      seen.o_proj = dense_rows(std::as_const(output_projection_).data(), o.outputs(), o.inputs());
    }
    on_layer_(seen.observation());
  }

 private:
  host_exec exec_;
  const Decoder& decoder_;
  const Cache& cache_;
  index_t tokens_, window_ = 0;
  CaptureOptions options_;
  OnLayer on_layer_;
  std::vector<float> window_queries_, lse_, column_sums_, output_projection_;  // of the layer that runs
  std::vector<index_t> positions_;
  std::vector<double> sums_;
  QueryStatistics statistics_;
};

}  // namespace kvevict::inline KVEVICT_ABI
