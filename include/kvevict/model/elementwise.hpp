// The parts of a decoder block that are no matrix product: RMSNorm, rotation of queries and keys, the gated SiLU. Each
// works on whole rows, so that no result depends on how rows are shared among threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/model/vector.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI::kernel {

// body(first, last) over blocks of rows.
template <class Body>
void for_row_blocks(const host_exec& exec, index_t rows, Body&& body) {
  constexpr index_t block = 16;
  parallel_for(exec, (rows + block - 1) / block, [&](std::int64_t b) {
    const auto first = static_cast<index_t>(b) * block;
    body(first, std::min(rows, first + block));
  });
}

// out = x / sqrt(mean(x^2) + epsilon) * weight; out may be x.
inline void rms_norm_row(const float* x, std::span<const float> weight, float epsilon, float* out) {
  const auto n = static_cast<index_t>(weight.size());
  Vec squares{};
  index_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    const Vec v = load(x + c);
    squares += v * v;
  }
  float sum = sum_lanes(squares);
  for (; c < n; ++c) sum += x[c] * x[c];
  const float factor = 1 / std::sqrt(sum / static_cast<float>(n) + epsilon);
  for (index_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[static_cast<std::size_t>(i)];
}

inline void rms_norm(const host_exec& exec, Matrix<const float> x, std::span<const float> weight, float epsilon,
                     Matrix<float> out) {
  for_row_blocks(exec, x.rows, [&](index_t first, index_t last) {
    for (index_t r = first; r < last; ++r) rms_norm_row(x.row(r), weight, epsilon, out.row(r));
  });
}

// out[r][c] = silu(x[r][c]) * x[r][width + c], width = out.cols.
inline void gated_silu(const host_exec& exec, Matrix<const float> x, Matrix<float> out) {
  const index_t width = out.cols;
  for_row_blocks(exec, x.rows, [&](index_t first, index_t last) {
    for (index_t r = first; r < last; ++r) {
      const float *gate = x.row(r), *up = gate + width;
      float* y = out.row(r);
      index_t c = 0;
      for (; c + lanes <= width; c += lanes) {
        const Vec g = load(gate + c);
        store(y + c, g / (1.f + exp(-g)) * load(up + c));
      }
      for (; c < width; ++c) y[c] = gate[c] / (1.f + exp(splat(-gate[c]))[0]) * up[c];
    }
  });
}

// Cosines and sines of the angles position * inv_freq, kept for all positions up to the largest that was needed.
// The angle is rounded to float32 before the cosine is taken, as the models were trained and recorded.
class RotaryTable {
 public:
  // Makes positions [0, count) ready.
  void prepare(const Rope& rope, index_t count) {
    half_ = static_cast<index_t>(rope.inv_freq.size());
    for (auto p = static_cast<index_t>(half_ ? table_.size() / (2 * rope.inv_freq.size()) : 0); p < count; ++p) {
      for (const float f : rope.inv_freq) table_.push_back(turn(rope, p, f, [](double a) { return std::cos(a); }));
      for (const float f : rope.inv_freq) table_.push_back(turn(rope, p, f, [](double a) { return std::sin(a); }));
    }
  }
  // Rotates one head's row in place.
  void rotate(RopeStyle style, index_t position, float* x) const noexcept {
    const float* cosine = table_.data() + std::int64_t{2} * position * half_;
    const float* sine = cosine + half_;
    if (style == RopeStyle::half) {
      for (index_t i = 0; i < half_; ++i) turn_pair(x[i], x[i + half_], cosine[i], sine[i]);
    } else {
      for (index_t i = 0; i < half_; ++i) turn_pair(x[2 * i], x[2 * i + 1], cosine[i], sine[i]);
    }
  }

 private:
  template <class Function>
  static float turn(const Rope& rope, index_t position, float frequency, Function function) {
    const float angle = static_cast<float>(position) * frequency;
    return static_cast<float>(function(static_cast<double>(angle))) * rope.attention_factor;
  }
  static void turn_pair(float& a, float& b, float c, float s) noexcept {
    const float first = a * c - b * s;
    b = b * c + a * s;
    a = first;
  }

  index_t half_ = 0;
  std::vector<float> table_;  // [position][cosines, sines][half]
};

}  // namespace kvevict::inline KVEVICT_ABI::kernel
