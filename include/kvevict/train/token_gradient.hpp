// LKV-T in training: scores of a batch of inputs by one head's network, and the gradients of its weights. General
// matrix products through Eigen; inference has its own kernel (token_kernel.hpp).
#pragma once
#include <Eigen/Core>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Hidden values before the activation, kept from the forward pass for the backward pass: [tokens][hidden]. Reuse one
// object; its memory grows to the largest batch.
template <std::floating_point T>
struct TokenNetState {
  std::vector<T, Eigen::aligned_allocator<T>> before;  // aligned, so that results do not depend on the allocator
};

namespace detail {
template <class T>
using TokenBlock = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using TokenVector = Eigen::Matrix<T, Eigen::Dynamic, 1>;
}  // namespace detail

// scores: [x.rows], written. x: [tokens][inputs], rows that lie one after the other.
template <std::floating_point T>
void token_net_forward(const TokenNet<const T>& net, Matrix<const T> x, TokenNetState<T>& state, std::span<T> scores) {
  using namespace detail;
  if (x.cols != net.inputs || x.row_stride != x.cols || scores.size() != static_cast<std::size_t>(x.rows))
    fail_argument("token_net_forward: inputs [", x.rows, "][", x.cols, "] for a network of ", net.inputs,
                  " inputs and ", scores.size(), " scores");
  const std::size_t size = static_cast<std::size_t>(x.rows) * static_cast<std::size_t>(net.hidden);
  if (state.before.size() < size) state.before.resize(size);
  Eigen::Map<TokenBlock<T>> z(state.before.data(), x.rows, net.hidden);
  z.noalias() = Eigen::Map<const TokenBlock<T>>(x.data, x.rows, x.cols) *
                Eigen::Map<const TokenBlock<T>>(net.w1, net.inputs, net.hidden);
  z.rowwise() += Eigen::Map<const TokenVector<T>>(net.b1, net.hidden).transpose();
  const Eigen::Map<const TokenVector<T>> w2(net.w2, net.hidden);
  Eigen::Map<TokenVector<T>>(scores.data(), x.rows) =
      ((z.array() / (1 + (-z.array()).exp())).rowwise() * w2.transpose().array()).rowwise().sum().matrix();
}

// Adds to `grads`. grad_scores: dL/dscores [x.rows]. `state` is of the forward call with the same inputs; its contents
// are used up.
template <std::floating_point T>
void token_net_backward(const TokenNet<const T>& net, Matrix<const T> x, TokenNetState<T>& state,
                        std::span<const T> grad_scores, const TokenNet<T>& grads) {
  using namespace detail;
  Eigen::Map<TokenBlock<T>> z(state.before.data(), x.rows, net.hidden);
  const Eigen::Map<const TokenVector<T>> g(grad_scores.data(), x.rows), w2(net.w2, net.hidden);
  Eigen::Map<TokenVector<T>> db1(grads.b1, net.hidden), dw2(grads.w2, net.hidden);
  for (index_t t = 0; t < x.rows; ++t) {
    auto row = z.row(t).array();
    const Eigen::Array<T, 1, Eigen::Dynamic> s = 1 / (1 + (-row).exp());
    dw2 += (g[t] * row * s).matrix().transpose();
    row = g[t] * w2.transpose().array() * s * (1 + row * (1 - s));
  }
  db1 += z.colwise().sum().transpose();
  Eigen::Map<TokenBlock<T>>(grads.w1, net.inputs, net.hidden).noalias() +=
      Eigen::Map<const TokenBlock<T>>(x.data, x.rows, x.cols).transpose() * z;
}

}  // namespace kvevict::inline KVEVICT_ABI
