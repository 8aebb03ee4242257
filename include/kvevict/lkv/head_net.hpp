// LKV-H: how many rows each (layer, head) keeps (arXiv 2605.06676). Every head owns an embedding; one network with one
// hidden layer, shared by all heads, turns it into a score; a Soft-TopK over all heads of the model at temperature 1
// turns the scores into retention ratios that sum to retain * heads.
//
//   score_h = silu(embedding_h W1 + b1) . w2,     ratio = SoftTopK(score; k = retain * heads)
//
// The retention is no input of the network, so one set of weights serves every budget, and a larger budget never takes
// rows from a head. No output bias: the operator is translation invariant. Computed in double; no dependencies.
//
// Beyond the paper, and off by default: a slope per head, times the doublings of the context beyond 512 tokens, may be
// added to the scores, so that budgets depend on the length.
#pragma once
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/lkv/silu.hpp"
#include "kvevict/lkv/soft_topk.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Weights, or their gradients (T not const). A width of 0 means free logits, one per head, in `embedding` [heads]
// ("direct": for tests and ablation).
template <class T>
struct HeadNet {
  index_t heads = 0;       // layers * kv_heads, layer by layer
  index_t width = 0;       // values of an embedding
  index_t hidden = 0;      // hidden units
  T* embedding = nullptr;  // [heads][width]
  T* w1 = nullptr;         // [width][hidden]
  T* b1 = nullptr;         // [hidden]
  T* w2 = nullptr;         // [hidden]
};

namespace detail {
// before[j] = (embedding_h W1 + b1)_j
template <class T>
void head_hidden(const HeadNet<T>& net, index_t head, std::span<double> before) {
  for (std::size_t j = 0; j < before.size(); ++j) before[j] = static_cast<double>(net.b1[j]);
  for (index_t i = 0; i < net.width; ++i) {
    const auto x = static_cast<double>(net.embedding[std::int64_t{head} * net.width + i]);
    const T* row = net.w1 + std::int64_t{i} * net.hidden;
    for (std::size_t j = 0; j < before.size(); ++j) before[j] += x * static_cast<double>(row[j]);
  }
}
}  // namespace detail

// scores: [heads], written. O(heads * width * hidden).
template <class T>
void head_scores(const HeadNet<T>& net, std::span<double> scores) {
  std::vector<double> before(static_cast<std::size_t>(net.hidden));
  for (index_t h = 0; h < net.heads; ++h) {
    double& s = scores[static_cast<std::size_t>(h)];
    if (net.width == 0) {
      s = static_cast<double>(net.embedding[h]);
      continue;
    }
    detail::head_hidden(net, h, before);
    s = 0;
    for (std::size_t j = 0; j < before.size(); ++j) s += detail::silu(before[j]) * static_cast<double>(net.w2[j]);
  }
}

// Adds the gradients of the weights to `grads` (same sizes as `net`). grad_scores: dL/dscores [heads].
template <class T>
void head_scores_backward(const HeadNet<const T>& net, std::span<const double> grad_scores, const HeadNet<T>& grads) {
  std::vector<double> before(static_cast<std::size_t>(net.hidden)), slope(before.size());
  for (index_t h = 0; h < net.heads; ++h) {
    const double g = grad_scores[static_cast<std::size_t>(h)];
    if (net.width == 0) {
      grads.embedding[h] += static_cast<T>(g);
      continue;
    }
    detail::head_hidden(net, h, before);
    for (std::size_t j = 0; j < before.size(); ++j) {
      slope[j] = g * static_cast<double>(net.w2[j]) * detail::silu_slope(before[j]);
      grads.w2[j] += static_cast<T>(g * detail::silu(before[j]));
      grads.b1[j] += static_cast<T>(slope[j]);
    }
    for (index_t i = 0; i < net.width; ++i) {
      const std::int64_t at = std::int64_t{h} * net.width + i, row = std::int64_t{i} * net.hidden;
      const auto x = static_cast<double>(net.embedding[at]);
      double dx = 0;
      for (std::size_t j = 0; j < before.size(); ++j) {
        const std::int64_t weight = row + static_cast<std::int64_t>(j);
        dx += slope[j] * static_cast<double>(net.w1[weight]);
        grads.w1[weight] += static_cast<T>(slope[j] * x);
      }
      grads.embedding[at] += static_cast<T>(dx);
    }
  }
}

namespace detail {
inline double doublings(index_t tokens) { return std::log2(static_cast<double>(std::max<index_t>(tokens, 1)) / 512); }
}  // namespace detail

// Adds slope_h * log2(tokens_h / 512) to the score of each head; slopes: [heads], or empty for none.
template <class T>
void add_length_scores(std::span<const T> slopes, std::span<const index_t> tokens, std::span<double> scores) {
  for (std::size_t h = 0; h < slopes.size(); ++h)
    scores[h] += static_cast<double>(slopes[h]) * detail::doublings(tokens[h]);
}

// Adds the gradients of the slopes to `grads`, [heads], or empty. grad_scores: dL/dscores [heads].
template <class T>
void length_scores_backward(std::span<const double> grad_scores, std::span<const index_t> tokens, std::span<T> grads) {
  for (std::size_t h = 0; h < grads.size(); ++h)
    grads[h] += static_cast<T>(grad_scores[h] * detail::doublings(tokens[h]));
}

// Retention ratios of all heads, [heads], from their scores; they sum to retain * heads. Returns the threshold, which
// head_ratios_backward wants.
inline double head_ratios(std::span<const double> scores, double retain, std::span<double> ratios) {
  std::vector<double> scratch(soft_topk_scratch(scores.size()));
  return soft_topk<double>(scores, retain * static_cast<double>(scores.size()), 1.0, ratios, scratch);
}

// grad_scores: dL/dscores [heads], written, from grad_ratios: dL/dratios [heads].
inline void head_ratios_backward(std::span<const double> scores, double threshold, std::span<const double> grad_ratios,
                                 std::span<double> grad_scores) {
  soft_topk_backward<double>(scores, threshold, 1.0, grad_ratios, grad_scores);
}

}  // namespace kvevict::inline KVEVICT_ABI
