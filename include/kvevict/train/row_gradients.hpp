// The parts of a decoder block that are not matrix products, forward and backward, on any scalar: RMSNorm, the gated
// SiLU. elementwise.hpp has the fast float forms of inference.
#pragma once
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <vector>

#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

template <class T>
using RowArray = Eigen::Array<T, 1, Eigen::Dynamic>;

template <class T>
using RowMap = Eigen::Map<RowArray<T>>;
template <class T>
using ConstRowMap = Eigen::Map<const RowArray<T>>;

// out = x / sqrt(mean(x^2) + epsilon) * weight, [width]; out may be x.
template <std::floating_point T>
void norm_row(const T* x, const T* weight, index_t width, T epsilon, T* out) {
  const ConstRowMap<T> in(x, width), w(weight, width);
  const T factor = 1 / std::sqrt(in.square().mean() + epsilon);
  RowMap<T>(out, width) = in * factor * w;
}

// dx (+)= gradient of norm_row at x for dy. dx may be dy where nothing is added.
template <std::floating_point T>
void norm_row_backward(const T* x, const T* weight, index_t width, T epsilon, const T* dy, T* dx, bool add) {
  const ConstRowMap<T> in(x, width), w(weight, width), g(dy, width);
  const T factor = 1 / std::sqrt(in.square().mean() + epsilon);
  const T slope = factor * factor * factor * (in * w * g).sum() / static_cast<T>(width);
  RowMap<T> out(dx, width);
  if (add) out += factor * w * g - slope * in;
  else out = factor * w * g - slope * in;
}

// out = silu(gate) * up, [width].
template <std::floating_point T>
void gated_row(const T* gate, const T* up, index_t width, T* out) {
  const ConstRowMap<T> g(gate, width), u(up, width);
  RowMap<T>(out, width) = g / (1 + (-g).exp()) * u;
}

// Replaces gate and up by dL/dgate and dL/dup, for dL/dout.
template <std::floating_point T>
void gated_row_backward(T* gate, T* up, index_t width, const T* dout) {
  const ConstRowMap<T> d(dout, width);
  RowMap<T> g(gate, width), u(up, width);
  for (index_t i = 0; i < width; i += 256) {  // pieces that stay in registers and the first-level cache
    const index_t n = std::min<index_t>(256, width - i);
    const Eigen::Array<T, 1, Eigen::Dynamic, Eigen::RowMajor, 1, 256> x = g.segment(i, n), s = 1 / (1 + (-x).exp());
    g.segment(i, n) = d.segment(i, n) * u.segment(i, n) * s * (1 + x * (1 - s));
    u.segment(i, n) = d.segment(i, n) * x * s;
  }
}

// Memory that grows to the largest matrix asked for and stays. Aligned: where vector instructions begin in a row
// decides the last bits, and must not depend on the allocator.
template <class T>
class GrowingMatrix {
 public:
  Matrix<T> view(index_t rows, index_t cols) {
    const std::size_t size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
    if (memory_.size() < size) memory_.resize(size);
    return last_ = {memory_.data(), rows, cols, cols};
  }
  // What view() returned last.
  Matrix<T> last() const noexcept { return last_; }

 private:
  Matrix<T> last_;
  std::vector<T, Eigen::aligned_allocator<T>> memory_;
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
