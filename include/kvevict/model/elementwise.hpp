// The parts of a decoder block that are not matrix products: RMSNorm and the gated SiLU. Each works on whole rows, so
// that no result depends on how rows are shared among threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/vector.hpp"

namespace kvevict::inline KVEVICT_ABI::kernel {

inline constexpr auto lanes = static_cast<index_t>(simd::width);

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
  simd::Vec squares = simd::zero();
  index_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    const simd::Vec v = simd::load(x + c);
    squares = simd::mul_add(v, v, squares);
  }
  float sum = simd::sum(squares);
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
      for (; c + lanes <= width; c += lanes)
        simd::store(simd::mul(simd::silu(simd::load(gate + c)), simd::load(up + c)), y + c);
      for (; c < width; ++c) y[c] = simd::first(simd::silu(simd::set(gate[c]))) * up[c];
    }
  });
}

}  // namespace kvevict::inline KVEVICT_ABI::kernel
