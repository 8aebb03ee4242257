// What a scorer may look at in one layer. Everything is a view; ObservedLayer owns the small arrays behind one.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
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
  float softmax_scale = 1.f;
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

// Owner of one layer's observation: fill the arrays, then take observation().
template <class T>
struct ObservedLayer {
  LayerObservation<T> view;  // the plain fields; spans are set by observation()
  std::vector<Rows<const T>> keys, values, window_queries, future_queries;
  std::vector<std::span<const index_t>> positions;
  std::vector<Rows<const float>> attn_sum, q_mean, q_cov;
  std::shared_ptr<const void> owner;  // keeps alive what the arrays point to, where whoever filled them has set it

  // Valid while this object and the rows behind it live and do not move.
  LayerObservation<T> observation() const {
    LayerObservation<T> o = view;
    o.keys = keys;
    o.values = values;
    o.positions = positions;
    o.window_queries = window_queries;
    o.extras.attn_sum = attn_sum;
    o.extras.q_mean = q_mean;
    o.extras.q_cov = q_cov;
    o.extras.future_queries = future_queries;
    return o;
  }
};

// Keys, values and positions of one layer of any host cache. What the view cannot know (queries, rope) is left to set.
template <KVCacheView C>
requires(C::memory_space::host) ObservedLayer<typename C::element_type> observe(const C& cache, index_t layer,
                                                                                float softmax_scale) {
  ObservedLayer<typename C::element_type> out;
  out.view.shape = cache.shape();
  out.view.layer = layer;
  out.view.softmax_scale = softmax_scale;
  for (index_t h = 0; h < out.view.shape.kv_heads; ++h) {
    out.keys.push_back(cache.keys(layer, h));
    out.values.push_back(cache.values(layer, h));
    out.positions.push_back(cache.positions(layer, h));
  }
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
