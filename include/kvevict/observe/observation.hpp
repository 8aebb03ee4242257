// What a scorer may look at in one layer: LayerObservation is the view that scorers take, OwnedObservation the arrays
// behind one. All layers of a cache at once: observe/observations.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kvevict/cache/check_view.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Optional inputs. Spans are empty and data pointers null where an input was not recorded.
template <class T>
struct ObservationExtras {
  std::span<const float> lse;                   // [q_heads * window], log-sum-exp of the window rows
  std::span<const Rows<const float>> attn_sum;  // one of [q_heads][tokens]: column sums of the causal attention
  std::span<const Rows<const float>> q_mean;    // one of [q_heads][head_dim_k], pre-RoPE, tokens q_stats_first on
  std::span<const Rows<const float>> q_cov;     // [q_heads] of [head_dim_k][head_dim_k], divisor N
  index_t q_stats_first = 0;
  Rows<const T> o_proj{};                         // [hidden][q_heads * head_dim_v]
  std::span<const Rows<const T>> future_queries;  // [q_heads] of [continuation][head_dim_k]; `oracle` alone reads them
};

template <class T>
struct LayerObservation {
  using element_type = T;

  CacheShape shape;
  index_t layer = 0;
  float softmax_scale = 0.f;  // of the attention logits; 0 is none, which scorers that look at logits refuse
  Rope rope;
  std::span<const Rows<const T>> keys, values;          // [kv_heads]; keys[h].rows is the head's number of tokens
  std::span<const std::span<const index_t>> positions;  // [kv_heads][tokens]
  std::span<const Rows<const T>> window_queries;        // [q_heads] of [window][head_dim_k], post-RoPE; may be empty
  std::span<const index_t> window_positions;            // [window], ascending
  ObservationExtras<T> extras;

  index_t tokens(index_t head) const { return static_cast<index_t>(keys[static_cast<std::size_t>(head)].rows); }
  index_t most_tokens() const {
    index_t most = 0;
    for (const auto& k : keys) most = std::max(most, static_cast<index_t>(k.rows));
    return most;
  }
};

// The arrays behind the view of one layer: fill them, then take observation(). Fields mean what they mean in
// LayerObservation; rows are views all the same, and what they show must outlive this object unless `owner` holds it.
template <class T>
struct OwnedObservation {
  CacheShape shape;
  index_t layer = 0;
  float softmax_scale = 0.f;
  Rope rope;
  std::vector<Rows<const T>> keys, values;
  std::vector<std::span<const index_t>> positions;
  std::vector<Rows<const T>> window_queries;
  std::span<const index_t> window_positions;

  std::span<const float> lse;
  std::vector<Rows<const float>> attn_sum, q_mean, q_cov;
  index_t q_stats_first = 0;
  Rows<const T> o_proj{};
  std::vector<Rows<const T>> future_queries;

  std::shared_ptr<const void> owner;  // keeps alive what the arrays point to, where whoever filled them has set it

  // Valid while this object lives, whether or not it moves, and its arrays are not changed.
  LayerObservation<T> observation() const& {
    return {shape,
            layer,
            softmax_scale,
            rope,
            keys,
            values,
            positions,
            window_queries,
            window_positions,
            {lse, attn_sum, q_mean, q_cov, q_stats_first, o_proj, future_queries}};
  }
  LayerObservation<T> observation() const&& = delete;
};

// Keys, values and positions of one layer of any host cache. What the cache cannot know (queries, rope) is left to set.
// Throws std::invalid_argument for a layer that does not exist, and where rows, positions and tokens of a head
// disagree. Valid while the cache lives and its rows stay where they are.
template <KVCacheView C>
requires(C::memory_space::host)
    [[nodiscard]] OwnedObservation<typename C::element_type> observe_layer(const C& cache, index_t layer,
                                                                           float softmax_scale) {
  OwnedObservation<typename C::element_type> out;
  out.shape = cache.shape();
  out.layer = layer;
  out.softmax_scale = softmax_scale;
  check_layer("observe_layer", out.shape, layer);
  for (index_t h = 0; h < out.shape.kv_heads; ++h) {
    check_head("observe_layer", cache, layer, h);
    out.keys.push_back(cache.keys(layer, h));
    out.values.push_back(cache.values(layer, h));
    out.positions.push_back(cache.positions(layer, h));
  }
  return out;
}
template <OwningCache C>
void observe_layer(const C&& cache, index_t layer, float softmax_scale) = delete;

}  // namespace kvevict::inline KVEVICT_ABI
