// Soft-TopK: the differentiable top-k of LKV (arXiv 2605.06676), also known as LapSum (ICML 2025) and ThreTopK (2024).
//
//   mask_i = F(scores_i / temperature - threshold),   threshold chosen so that sum_i mask_i = k,   k real in (0, n)
//
// F is the CDF of the Laplace distribution, F(z) = e^z / 2 below zero and 1 - e^-z / 2 above, which makes the threshold
// a closed form once the scores are sorted. The printed closed form divides by zero where no score exceeds the
// threshold (the normal state of head budgets before training) and overflows at small temperatures; the solver here is
// written in differences of neighbouring scores, so it holds in every branch: |sum - k| < 1e-12 k measured in double
// down to temperature 1e-3. A logistic F, solved by a bracketed Newton iteration, is there for ablation.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Which CDF turns scores into a mask.
enum class SoftThreshold { laplace, sigmoid };
constexpr auto words_of(SoftThreshold) noexcept { return std::to_array<std::string_view>({"laplace", "sigmoid"}); }

// k never reaches 0 or n, where the threshold would be infinite.
inline constexpr double soft_topk_margin = 1e-3;
constexpr double soft_topk_clamp(double k, std::size_t n) noexcept {
  return std::clamp(k, soft_topk_margin, static_cast<double>(n) - soft_topk_margin);
}

// Doubles of working memory that soft_topk wants for n scores.
constexpr std::size_t soft_topk_scratch(std::size_t n) noexcept { return 2 * n; }

namespace detail {

inline double soft_step(SoftThreshold kind, double z) noexcept {
  const double e = std::exp(-std::abs(z));
  if (kind == SoftThreshold::laplace) return z < 0 ? 0.5 * e : 1 - 0.5 * e;
  return (z < 0 ? e : 1.0) / (1 + e);
}

// F'(z) e^s where s is the smallest |z| of a row: weights relative to the largest never vanish all together.
inline double soft_density(SoftThreshold kind, double z, double smallest) noexcept {
  const double e = std::exp(smallest - std::abs(z));
  if (kind == SoftThreshold::laplace) return 0.5 * e;
  const double one = 1 + std::exp(-std::abs(z));
  return e / (one * one);
}

// x sorted descending, k in (0, n); below: n doubles of working memory.
inline double laplace_threshold(std::span<const double> x, double k, std::span<double> below) noexcept {
  const std::size_t n = x.size();
  // below[j] = sum over i <= j of e^(x_j - x_i), in [1, j + 1].
  below[0] = 1;
  for (std::size_t j = 1; j < n; ++j) below[j] = 1 + std::exp(x[j] - x[j - 1]) * below[j - 1];
  // above = sum over i > j of e^(x_i - x_j). A threshold at x_j would give sum_j = (j + 1) - below_j / 2 + above_j / 2,
  // which grows with j; m counts the scores above the threshold that gives k.
  double above = 0, above_next = 0;
  std::size_t m = n;
  while (m > 0) {
    const std::size_t j = m - 1;
    if (m < n) above = std::exp(x[j + 1] - x[j]) * (1 + above_next);
    if (static_cast<double>(m) - 0.5 * below[j] + 0.5 * above <= k) break;
    above_next = above;
    --m;
  }
  if (m == 0) return x[0] + std::log((1 + above_next) / (2 * k));
  if (m == n) return x[n - 1] + std::log(2 * (static_cast<double>(n) - k) / below[n - 1]);
  const double d = k - static_cast<double>(m), p = below[m - 1];
  const double log_q = (x[m] - x[m - 1]) + std::log1p(above_next);  // log of above_{m-1}, which itself may underflow
  const double root = std::sqrt(d * d + p * std::exp(log_q));
  if (d > 0) return x[m - 1] + log_q - std::log(d + root);
  if (d < 0) return x[m - 1] + std::log(root - d) - std::log(p);
  return x[m - 1] + 0.5 * (log_q - std::log(p));
}

// Newton's iteration inside a bracket that shrinks; x in any order.
inline double sigmoid_threshold(std::span<const double> x, double k) noexcept {
  const auto n = static_cast<double>(x.size());
  const auto [least, most] = std::minmax_element(x.begin(), x.end());
  const double logit = std::log(k / (n - k));
  double low = *least - logit, high = *most - logit;  // equal scores would put the threshold at one of these
  double at = 0.5 * (low + high);
  for (int i = 0; i < 200 && low < high; ++i) {
    double sum = -k, slope = 0;
    for (const double v : x) {
      const double f = soft_step(SoftThreshold::sigmoid, v - at);
      sum += f;
      slope += f * (1 - f);
    }
    if (std::abs(sum) <= 1e-14 * k) break;
    (sum > 0 ? low : high) = at;
    const double newton = at + sum / slope;
    const double next = newton > low && newton < high ? newton : 0.5 * (low + high);
    if (next == at) break;
    at = next;
  }
  return at;
}

}  // namespace detail

// mask_i for one row; returns the threshold in units of score / temperature. The sum of the mask is k, clamped to
// [0.001, n - 0.001]. scratch: soft_topk_scratch(n) doubles; nothing is allocated. `mask` may be `scores`.
// Throws std::domain_error for a score that is not finite and std::invalid_argument for a bad k or temperature.
// O(n log n).
template <std::floating_point T>
double soft_topk(std::span<const T> scores, double k, double temperature, std::span<T> mask, std::span<double> scratch,
                 SoftThreshold kind = SoftThreshold::laplace) {
  const std::size_t n = scores.size();
  if (mask.size() != n || scratch.size() < soft_topk_scratch(n))
    fail_argument("soft_topk: ", n, " scores need a mask of as many and ", soft_topk_scratch(n),
                  " doubles of scratch, not ", mask.size(), " and ", scratch.size());
  if (!(temperature > 0) || !std::isfinite(temperature))
    fail_argument("soft_topk: temperature ", temperature, "; it must be positive and finite");
  if (std::isnan(k)) fail_argument("soft_topk: k is NaN");
  if (n == 0) return std::numeric_limits<double>::infinity();
  const std::span<double> x = scratch.first(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<double>(scores[i]) / temperature;
    if (!std::isfinite(x[i])) fail_domain("soft_topk: score ", i, " is ", scores[i], "; finite scores are required");
  }
  k = soft_topk_clamp(k, n);
  double threshold;
  if (kind == SoftThreshold::laplace) {
    std::sort(x.begin(), x.end(), std::greater<>());
    threshold = detail::laplace_threshold(x, k, scratch.subspan(n, n));
  } else {
    threshold = detail::sigmoid_threshold(x, k);
  }
  for (std::size_t i = 0; i < n; ++i)
    mask[i] = static_cast<T>(detail::soft_step(kind, static_cast<double>(scores[i]) / temperature - threshold));
  return threshold;
}

// What a loss loses or gains with the two scalars of soft_topk.
struct SoftTopKGradient {
  double k = 0;            // the mean of grad_mask over the boundary: the marginal value of one more row
  double temperature = 0;  // only of use where the temperature is learned
};

// Gradients of one row by the implicit function theorem. grad_mask: dL/dmask [n]; grad_scores: dL/dscores [n], written,
// may be grad_mask or empty (not wanted). threshold: what soft_topk returned. Where every density underflows,
// grad_scores is zero and the gradient of k is the mean of grad_mask over the scores next to the threshold. O(n),
// allocates nothing.
template <std::floating_point T>
SoftTopKGradient soft_topk_backward(std::span<const T> scores, double threshold, double temperature,
                                    std::span<const T> grad_mask, std::span<T> grad_scores,
                                    SoftThreshold kind = SoftThreshold::laplace) {
  const std::size_t n = scores.size();
  if (grad_mask.size() != n || (!grad_scores.empty() && grad_scores.size() != n))
    fail_argument("soft_topk_backward: ", n, " scores need as many gradients, not ", grad_mask.size(), " and ",
                  grad_scores.size());
  if (n == 0) return {};
  double smallest = std::numeric_limits<double>::infinity();
  const auto z = [&](std::size_t i) { return static_cast<double>(scores[i]) / temperature - threshold; };
  for (std::size_t i = 0; i < n; ++i) smallest = std::min(smallest, std::abs(z(i)));
  double weight = 0, value = 0, place = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double w = detail::soft_density(kind, z(i), smallest);
    weight += w;
    value += w * static_cast<double>(grad_mask[i]);
    place += w * z(i);
  }
  const double mean_value = value / weight, mean_place = place / weight, scale = std::exp(-smallest) / temperature;
  double slope = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double w = detail::soft_density(kind, z(i), smallest), g = static_cast<double>(grad_mask[i]);
    slope += w * (z(i) - mean_place) * g;
    if (!grad_scores.empty()) grad_scores[i] = static_cast<T>(scale * w * (g - mean_value));
  }
  return {mean_value, -scale * slope};
}

// soft_topk for every row of a matrix, [rows][cols]; k and thresholds: [rows]. Rows are independent of the number of
// threads, bit for bit.
template <std::floating_point T>
void soft_topk_rows(const host_exec& exec, Matrix<const T> scores, std::span<const double> k, double temperature,
                    Matrix<T> masks, std::span<double> thresholds, SoftThreshold kind = SoftThreshold::laplace) {
  const auto rows = static_cast<std::size_t>(scores.rows), cols = static_cast<std::size_t>(scores.cols);
  if (masks.rows != scores.rows || masks.cols != scores.cols || k.size() != rows || thresholds.size() != rows)
    fail_argument("soft_topk_rows: scores [", rows, "][", cols, "], masks [", masks.rows, "][", masks.cols, "], k [",
                  k.size(), "], thresholds [", thresholds.size(), "] do not fit together");
  const std::size_t wanted = soft_topk_scratch(cols);
  parallel_for(exec, scores.rows, wanted * sizeof(double), [&](std::int64_t r, std::span<std::byte> scratch) {
    const auto row = static_cast<index_t>(r);
    const auto at = static_cast<std::size_t>(r);
    thresholds[at] = soft_topk<T>({scores.row(row), cols}, k[at], temperature, {masks.row(row), cols},
                                  {reinterpret_cast<double*>(scratch.data()), wanted}, kind);
  });
}

// soft_topk_backward for every row; grad_k: [rows], written.
template <std::floating_point T>
void soft_topk_rows_backward(const host_exec& exec, Matrix<const T> scores, std::span<const double> thresholds,
                             double temperature, Matrix<const T> grad_masks, Matrix<T> grad_scores,
                             std::span<double> grad_k, SoftThreshold kind = SoftThreshold::laplace) {
  const auto cols = static_cast<std::size_t>(scores.cols);
  parallel_for(exec, scores.rows, [&](std::int64_t r) {
    const auto row = static_cast<index_t>(r);
    const auto at = static_cast<std::size_t>(r);
    grad_k[at] = soft_topk_backward<T>({scores.row(row), cols}, thresholds[at], temperature,
                                       {grad_masks.row(row), cols}, {grad_scores.row(row), cols}, kind)
                     .k;
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
