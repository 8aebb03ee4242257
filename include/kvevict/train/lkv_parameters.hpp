// All trainable numbers of LKV as one flat vector: embeddings and the shared network of LKV-H and its slopes over the
// length, then the networks of LKV-T head by head. The vector is what an optimiser sees; views give each network its
// part.
//
// LKV-T is trained on standardised inputs, (x - mean) / deviation with fixed statistics per head and channel, because
// raw channels differ a hundredfold in scale; export_tensors folds them into the first layer, so that inference sees
// raw rows. Scores are never standardised. Distance features are left as they are.
#pragma once
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/head_net.hpp"
#include "kvevict/lkv/token_net.hpp"
#include "kvevict/train/noise.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Where each part lies in the vector. sizes.head_width = 0 means one free logit per head ("direct").
class LkvLayout {
 public:
  explicit LkvLayout(const LkvSizes& sizes) : sizes_(sizes) {}

  const LkvSizes& sizes() const noexcept { return sizes_; }
  std::int64_t head_size() const noexcept { return head_net_size() + length_size(); }
  std::int64_t token_size() const noexcept {  // of one head
    return std::int64_t{sizes_.token_inputs() + 2} * sizes_.token_hidden;
  }
  std::size_t size() const noexcept { return static_cast<std::size_t>(head_size() + sizes_.heads() * token_size()); }

  template <class T>
  HeadNet<T> head_net(T* p) const noexcept {
    const auto heads = static_cast<index_t>(sizes_.heads());
    if (sizes_.head_width == 0) return {heads, 0, 0, p, nullptr, nullptr, nullptr};
    T* const w1 = p + std::int64_t{heads} * sizes_.head_width;
    T* const b1 = w1 + std::int64_t{sizes_.head_width} * sizes_.head_hidden;
    return {heads, sizes_.head_width, sizes_.head_hidden, p, w1, b1, b1 + sizes_.head_hidden};
  }
  // [heads], or empty.
  template <class T>
  std::span<T> length_slopes(T* p) const noexcept {
    return {p + head_net_size(), static_cast<std::size_t>(length_size())};
  }
  // head: over all layers, layer by layer.
  template <class T>
  TokenNet<T> token_net(T* p, std::int64_t head) const noexcept {
    T* const w1 = p + head_size() + head * token_size();
    T* const b1 = w1 + std::int64_t{sizes_.token_inputs()} * sizes_.token_hidden;
    return {sizes_.token_inputs(), sizes_.token_hidden, w1, b1, b1 + sizes_.token_hidden};
  }

 private:
  std::int64_t head_net_size() const noexcept {
    if (sizes_.head_width == 0) return sizes_.heads();
    return sizes_.heads() * sizes_.head_width + std::int64_t{sizes_.head_width + 2} * sizes_.head_hidden;
  }
  std::int64_t length_size() const noexcept { return sizes_.head_length ? sizes_.heads() : 0; }

  LkvSizes sizes_;
};

// First weights: W ~ N(0, 1 / inputs), biases 0, embeddings N(0, 1) and a small output layer of LKV-H, so that ratios
// begin near the retention.
template <std::floating_point T>
std::vector<T> initial_parameters(const LkvLayout& layout, std::uint64_t seed) {
  std::vector<T> p(layout.size(), T(0));
  const CounterRandom random(seed, parameter_stream);
  std::uint64_t counter = 0;
  const auto fill = [&](T* first, std::int64_t count, double scale) {
    for (std::int64_t i = 0; i < count; ++i) first[i] = static_cast<T>(scale * random.normal(counter++));
  };
  const HeadNet<T> h = layout.head_net(p.data());
  if (h.width > 0) {
    fill(h.embedding, std::int64_t{h.heads} * h.width, 1);
    fill(h.w1, std::int64_t{h.width} * h.hidden, 1 / std::sqrt(static_cast<double>(h.width)));
    fill(h.w2, h.hidden, 0.1 / std::sqrt(static_cast<double>(h.hidden)));
  }
  for (std::int64_t head = 0; head < layout.sizes().heads(); ++head) {
    const TokenNet<T> t = layout.token_net(p.data(), head);
    fill(t.w1, std::int64_t{t.inputs} * t.hidden, 1 / std::sqrt(static_cast<double>(t.inputs)));
    fill(t.w2, t.hidden, 1 / std::sqrt(static_cast<double>(t.hidden)));
  }
  return p;
}

// Statistics of inputs, [heads][inputs]: x is fed as (x - mean) * inverse.
struct InputScale {
  std::vector<float> mean, inverse;

  static InputScale identity(const LkvSizes& sizes) {
    const auto n = static_cast<std::size_t>(sizes.heads() * sizes.token_inputs());
    return {std::vector<float>(n, 0.f), std::vector<float>(n, 1.f)};
  }
};

// Sums up inputs of many samples, head by head, then gives their mean and deviation per channel.
class InputScaleEstimate {
 public:
  explicit InputScaleEstimate(const LkvSizes& sizes)
      : sizes_(sizes),
        count_(static_cast<std::size_t>(sizes.heads()), 0.0),
        sum_(count_.size() * static_cast<std::size_t>(sizes.token_inputs()), 0.0),
        square_(sum_) {}

  // x: [tokens][inputs] of one head.
  void add(std::int64_t head, Matrix<const float> x) {
    const auto n = static_cast<std::size_t>(sizes_.token_inputs()), at = static_cast<std::size_t>(head) * n;
    count_[static_cast<std::size_t>(head)] += x.rows;
    for (index_t r = 0; r < x.rows; ++r)
      for (std::size_t i = 0; i < n; ++i) {
        const auto v = static_cast<double>(x.row(r)[i]);
        sum_[at + i] += v;
        square_[at + i] += v * v;
      }
  }
  InputScale result() const {
    InputScale out = InputScale::identity(sizes_);
    const auto n = static_cast<std::size_t>(sizes_.token_inputs());
    const std::size_t scaled = n - static_cast<std::size_t>(sizes_.input.features_count());
    for (std::size_t h = 0; h < count_.size(); ++h)
      for (std::size_t i = 0; i < scaled && count_[h] > 0; ++i) {
        const double mean = sum_[h * n + i] / count_[h];
        const double variance = std::max(square_[h * n + i] / count_[h] - mean * mean, 1e-12);
        out.mean[h * n + i] = static_cast<float>(mean);
        out.inverse[h * n + i] = static_cast<float>(1 / std::sqrt(variance));
      }
    return out;
  }

 private:
  LkvSizes sizes_;
  std::vector<double> count_, sum_, square_;
};

// Weights as a checkpoint holds them, for inference on raw rows.
struct ExportedLkv {
  LkvSizes sizes;
  std::vector<float> embedding, head_w1, head_b1, head_w2, token_w1, token_b1, token_w2, head_length;
  LkvTensors tensors() const noexcept {
    return {embedding, head_w1, head_b1, head_w2, token_w1, token_b1, token_w2, head_length};
  }
};

// Folds the input scale into the first layers. Free logits become a network of width 1 that computes them exactly: far
// above zero SiLU is the identity, and a shift of all scores changes no ratio.
template <std::floating_point T>
ExportedLkv export_tensors(const LkvLayout& layout, std::span<const T> parameters, const InputScale& scale) {
  ExportedLkv out;
  out.sizes = layout.sizes();
  const HeadNet<const T> h = layout.head_net(parameters.data());
  const auto copy = [](const T* first, std::int64_t count, std::vector<float>& to) {
    for (std::int64_t i = 0; i < count; ++i) to.push_back(static_cast<float>(first[i]));
  };
  if (h.width == 0) {
    out.sizes.head_width = out.sizes.head_hidden = 1;
    copy(h.embedding, h.heads, out.embedding);
    const float lowest = *std::min_element(out.embedding.begin(), out.embedding.end());
    out.head_w1 = out.head_w2 = {1.f};
    out.head_b1 = {64.f - std::min(lowest, 0.f)};
  } else {
    copy(h.embedding, std::int64_t{h.heads} * h.width, out.embedding);
    copy(h.w1, std::int64_t{h.width} * h.hidden, out.head_w1);
    copy(h.b1, h.hidden, out.head_b1);
    copy(h.w2, h.hidden, out.head_w2);
  }
  const auto slopes = layout.length_slopes(parameters.data());
  copy(slopes.data(), std::ssize(slopes), out.head_length);
  for (std::int64_t head = 0; head < out.sizes.heads(); ++head) {
    const TokenNet<const T> t = layout.token_net(parameters.data(), head);
    std::vector<double> bias(t.b1, t.b1 + t.hidden);
    for (index_t i = 0; i < t.inputs; ++i) {
      const auto at = static_cast<std::size_t>(head * t.inputs + i);
      const auto inverse = static_cast<double>(scale.inverse[at]), mean = static_cast<double>(scale.mean[at]);
      for (index_t j = 0; j < t.hidden; ++j) {
        const double w = inverse * static_cast<double>(t.w1[std::int64_t{i} * t.hidden + j]);
        out.token_w1.push_back(static_cast<float>(w));
        bias[static_cast<std::size_t>(j)] -= mean * w;
      }
    }
    for (const double b : bias) out.token_b1.push_back(static_cast<float>(b));
    copy(t.w2, t.hidden, out.token_w2);
  }
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
