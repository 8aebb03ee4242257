// A prefill with everything that scorers may ask for kept for all layers at once. Inside a layer attention is full, so
// what a policy sees does not depend on the policy: one prefill serves any number of them.
#pragma once
#include <cstddef>
#include <list>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/model/capture.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/observe/observations.hpp"

namespace kvevict::inline KVEVICT_ABI {

// The full cache of a prompt and one observation per layer.
class ObservedPrefill {
 public:
  // Throws as Decoder::feed does.
  ObservedPrefill(const host_exec& exec, const Decoder& decoder, std::span<const index_t> tokens,
                  const CaptureOptions& options, ForwardState& state)
      : cache_(decoder.cache_shape()) {
    const auto n = static_cast<index_t>(tokens.size());
    std::vector<OwnedObservation<float>> layers;
    decoder.feed(exec, tokens, cache_, state,
                 LayerCapture(exec, decoder, cache_, n, options, [&](const auto& o) { layers.push_back(kept(o)); }));
    observations_ = Observations<float>(std::move(layers));
  }
  ObservedPrefill(const ObservedPrefill&) = delete;  // the observations point into the cache
  ObservedPrefill& operator=(const ObservedPrefill&) = delete;

  const RaggedCache<float>& cache() const& noexcept { return cache_; }
  const RaggedCache<float>& cache() const&& = delete;
  std::span<const LayerObservation<float>> observations() const& noexcept {
    return observations_.layers();
  }  // [layers]
  std::span<const LayerObservation<float>> observations() const&& = delete;

 private:
  Rows<const float> copy(const Rows<const float>& rows) {
    auto& values = memory_.emplace_back();
    values.reserve(static_cast<std::size_t>(rows.rows) * static_cast<std::size_t>(rows.cols));
    for (std::int64_t r = 0; r < rows.rows; ++r)
      for (index_t c = 0; c < rows.cols; ++c) values.push_back(rows.at(r, c));
    return dense_rows(static_cast<const float*>(values.data()), rows.rows, rows.cols);
  }

  // The observation with copies of what the capture's buffers hold only until the next layer.
  OwnedObservation<float> kept(const LayerObservation<float>& o) {
    OwnedObservation<float> layer = observe_layer(cache_, o.layer, o.softmax_scale);
    layer.rope = o.rope;
    layer.q_stats_first = o.extras.q_stats_first;
    for (const auto& rows : o.window_queries) layer.window_queries.push_back(copy(rows));
    for (const auto& rows : o.extras.attn_sum) layer.attn_sum.push_back(copy(rows));
    for (const auto& rows : o.extras.q_mean) layer.q_mean.push_back(copy(rows));
    for (const auto& rows : o.extras.q_cov) layer.q_cov.push_back(copy(rows));
    if (o.extras.o_proj.data) layer.o_proj = copy(o.extras.o_proj);
    layer.lse = memory_.emplace_back(o.extras.lse.begin(), o.extras.lse.end());
    window_positions_.assign(o.window_positions.begin(), o.window_positions.end());  // the same in every layer
    layer.window_positions = window_positions_;
    return layer;
  }

  RaggedCache<float> cache_;
  std::list<std::vector<float>> memory_;  // what the observations point to
  std::vector<index_t> window_positions_;
  Observations<float> observations_;
};

}  // namespace kvevict::inline KVEVICT_ABI
