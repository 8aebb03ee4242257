// What the device tests and benchmarks share: a random model layer stack on the host and on the device.
#pragma once
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/cache.cuh"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/observe/observation.hpp"

namespace kvevict::device {

// A cheap generator: benchmarks fill gigabytes.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed * 2 + 1) {}
  float operator()() {  // about normal: the sum of four uniforms
    float sum = 0.f;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
      sum += static_cast<float>(state_ >> 40) * 0x1p-24f - 0.5f;
    }
    return 1.7f * sum;
  }

 private:
  std::uint64_t state_;
};

template <class T>
std::vector<T> noise(std::int64_t count, std::uint64_t seed, float scale = 1.f) {
  Noise next(seed);
  std::vector<T> out(static_cast<std::size_t>(count));
  for (auto& x : out) x = from_float<T>(scale * next());
  return out;
}

// Keys, values and window queries of all layers, in host memory.
template <class T>
class Model {
 public:
  using element_type = T;
  using memory_space = host_space;

  Model(const CacheShape& shape, std::vector<index_t> tokens, index_t window, std::uint64_t seed = 1)
      : shape_(shape), tokens_(std::move(tokens)), window_(window) {
    std::int64_t first = 0;
    for (const index_t t : tokens_) {
      first_.push_back(first);
      first += t;
      newest_ = std::max(newest_, t);
    }
    keys_ = noise<T>(first * shape.head_dim_k, seed);
    values_ = noise<T>(first * shape.head_dim_v, seed + 1);
    queries_ = noise<T>(std::int64_t{shape.layers} * shape.q_heads * window * shape.head_dim_k, seed + 2, 2.f);
    for (const index_t t : tokens_)
      for (index_t i = 0; i < t; ++i) positions_.push_back(newest_ - t + i);
    for (index_t i = 0; i < window; ++i) window_positions_.push_back(newest_ - window + i);
  }

  CacheShape shape() const { return shape_; }
  index_t tokens(index_t l, index_t h) const { return tokens_[at(l, h)]; }
  const std::vector<index_t>& all_tokens() const { return tokens_; }
  index_t newest() const { return newest_ - 1; }
  Rows<const T> keys(index_t l, index_t h) const {
    return dense_rows<const T>(keys_.data() + first_[at(l, h)] * shape_.head_dim_k, tokens(l, h), shape_.head_dim_k);
  }
  Rows<const T> values(index_t l, index_t h) const {
    return dense_rows<const T>(values_.data() + first_[at(l, h)] * shape_.head_dim_v, tokens(l, h), shape_.head_dim_v);
  }
  std::span<const index_t> positions(index_t l, index_t h) const {
    return {positions_.data() + first_[at(l, h)], static_cast<std::size_t>(tokens(l, h))};
  }
  const std::vector<T>& queries() const { return queries_; }
  const std::vector<index_t>& window_positions() const { return window_positions_; }

  // Any cache of this model with queries and window positions that lie where the cache lies.
  template <class Cache>
  OwnedObservation<T> observe(const Cache& cache, const T* queries, const index_t* window_positions, index_t l) const {
    OwnedObservation<T> out;
    out.shape = shape_;
    out.layer = l;
    out.softmax_scale = 1.f / std::sqrt(static_cast<float>(shape_.head_dim_k));
    out.window_positions = {window_positions, static_cast<std::size_t>(window_)};
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      out.keys.push_back(cache.keys(l, h));
      out.values.push_back(cache.values(l, h));
      out.positions.push_back(cache.positions(l, h));
    }
    for (index_t q = 0; q < shape_.q_heads; ++q)
      out.window_queries.push_back(dense_rows<const T>(
          queries + (std::int64_t{l} * shape_.q_heads + q) * window_ * shape_.head_dim_k, window_, shape_.head_dim_k));
    return out;
  }
  OwnedObservation<T> observe(index_t l) const { return observe(*this, queries_.data(), window_positions_.data(), l); }

 private:
  std::size_t at(index_t l, index_t h) const { return static_cast<std::size_t>(shape_.at(l, h)); }

  CacheShape shape_;
  std::vector<index_t> tokens_;
  index_t window_, newest_ = 0;
  std::vector<std::int64_t> first_;
  std::vector<T> keys_, values_, queries_;
  std::vector<index_t> positions_, window_positions_;
};

// The queries of a model on the device.
template <class T>
struct Queries {
  cuda::DeviceArray<T> rows;
  cuda::DeviceArray<index_t> positions;
  Queries(const cuda_exec& exec, const Model<T>& model)
      : rows(cuda::copied(exec, std::span<const T>(model.queries()))),
        positions(cuda::copied(exec, std::span<const index_t>(model.window_positions()))) {}
};

}  // namespace kvevict::device
