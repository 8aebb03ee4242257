// A small random model run with every input that any scorer may ask for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/random_cache.hpp"
#include "kvevict/observe/observations.hpp"

namespace kvevict::testing {

template <CacheElement T>
class World {
 public:
  // order: KV head h of this world is head order[h] of the unpermuted one, with its queries.
  World(const CacheShape& shape, const std::vector<index_t>& lengths, std::uint64_t seed,
        const std::vector<index_t>& order = {})
      : rows_(shape, lengths, seed), order_(order) {
    if (order_.empty())
      for (index_t h = 0; h < shape.kv_heads; ++h) order_.push_back(h);
    for (index_t i = 0; i < shape.head_dim_k / 2; ++i) inv_freq_.push_back(1.f / static_cast<float>(1 + 3 * i));
    const index_t d = shape.head_dim_k, group = shape.group();
    std::vector<OwnedObservation<T>> observed;
    for (index_t l = 0; l < shape.layers; ++l) {
      index_t most = 0;
      for (index_t h = 0; h < shape.kv_heads; ++h) most = std::max(most, rows_.tokens(l, h));
      const index_t window = std::min<index_t>(window_most, most);
      Layer layer;
      for (index_t w = 0; w < window; ++w) layer.window_positions.push_back(most - window + w);
      for (index_t q = 0; q < shape.q_heads; ++q) {
        const auto s = seed * 1000 + static_cast<std::uint64_t>(l * shape.q_heads + q) * 10;
        layer.queries.push_back(random_elements<T>(static_cast<std::size_t>(window * d), s + 1));
        layer.future.push_back(random_elements<T>(static_cast<std::size_t>(future_rows * d), s + 2));
        layer.q_mean.push_back(random_elements<float>(static_cast<std::size_t>(d), s + 3));
        layer.q_cov.push_back(covariance(d, s + 4));
      }
      layer.attn_sum = random_elements<float>(static_cast<std::size_t>(shape.q_heads * most), seed + 5);
      layer.o_proj = random_elements<T>(static_cast<std::size_t>(16 * shape.q_heads * shape.head_dim_v), seed + 6);
      layers_.push_back(std::move(layer));
      const Layer& kept = layers_.back();
      OwnedObservation<T> o;
      o.shape = shape;
      o.layer = l;
      o.softmax_scale = 0.4f;
      o.rope = {RopeStyle::half, d, inv_freq_, 1.f};
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        const index_t from = order_[static_cast<std::size_t>(h)];
        o.keys.push_back(rows_.keys(l, from));
        o.values.push_back(rows_.values(l, from));
        o.positions.push_back(rows_.positions(l, from));
        for (index_t g = 0; g < group; ++g) {
          const auto q = static_cast<std::size_t>(from * group + g);
          o.window_queries.push_back(dense_rows<const T>(kept.queries[q].data(), window, d));
          o.future_queries.push_back(dense_rows<const T>(kept.future[q].data(), future_rows, d));
          o.q_cov.push_back(dense_rows<const float>(kept.q_cov[q].data(), d, d));
          q_means_[static_cast<std::size_t>(l)].insert(q_means_[static_cast<std::size_t>(l)].end(),
                                                       kept.q_mean[q].begin(), kept.q_mean[q].end());
        }
      }
      o.q_mean.push_back(dense_rows<const float>(q_means_[static_cast<std::size_t>(l)].data(), shape.q_heads, d));
      o.attn_sum.push_back(dense_rows<const float>(kept.attn_sum.data(), shape.q_heads, most));
      o.o_proj = dense_rows<const T>(kept.o_proj.data(), 16, shape.q_heads * shape.head_dim_v);
      o.window_positions = kept.window_positions;
      observed.push_back(std::move(o));
    }
    observations_ = Observations<T>(std::move(observed));
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const RandomRows<T>& rows() const { return rows_; }
  std::span<const LayerObservation<T>> observations() const { return observations_.layers(); }

 private:
  static constexpr index_t window_most = 40, future_rows = 5;
  struct Layer {
    std::vector<std::vector<T>> queries, future;
    std::vector<std::vector<float>> q_mean, q_cov;
    std::vector<float> attn_sum;
    std::vector<T> o_proj;
    std::vector<index_t> window_positions;
  };

  // Symmetric and positive semidefinite: a sum of three outer products.
  static std::vector<float> covariance(index_t d, std::uint64_t seed) {
    const auto n = static_cast<std::size_t>(d);
    const auto x = random_elements<float>(3 * n, seed, 0.5f);
    std::vector<float> out(n * n, 0.f);
    for (std::size_t k = 0; k < 3; ++k)
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = 0; j < n; ++j) out[i * n + j] += x[k * n + i] * x[k * n + j] / 3.f;
    return out;
  }

  RandomRows<T> rows_;
  std::vector<index_t> order_;
  std::vector<float> inv_freq_;
  std::vector<Layer> layers_ = reserved();
  std::vector<std::vector<float>> q_means_ = std::vector<std::vector<float>>(64);
  Observations<T> observations_;

  static std::vector<Layer> reserved() {
    std::vector<Layer> out;
    out.reserve(64);  // views point into the layers, so they must not move
    return out;
  }
};

}  // namespace kvevict::testing
