// Where rows are rounded, and nowhere else: exact floors, largest remainder, minimum, and the roundings of the
// reference codes. Quotas are compared in 128-bit integers, so every platform gives the same rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Nearest integer, a half goes to its even neighbour. |x| < 2^52; independent of the rounding mode.
inline std::int64_t round_half_even(double x) noexcept {
  const double below = std::floor(x);
  const auto whole = static_cast<std::int64_t>(below);
  const double fraction = x - below;  // exact
  if (fraction != 0.5) return whole + (fraction > 0.5);
  return whole + (whole & 1);
}

// a * b rounded on its own: a compiler that contracts it with a following addition changes the last bit, and with it
// the row counts that the reference modes must reproduce.
inline double rounded_product(double a, double b) noexcept {
  volatile double product = a * b;
  return product;
}

// Rows of a head that kvpress keeps: max(1, int(tokens * (1 - r))) with r = 1 - retain in double; 0 of 0 tokens.
inline std::int64_t rows_as_kvpress(std::int64_t tokens, double retain) noexcept {
  if (tokens == 0) return 0;
  const double removed = 1.0 - retain;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(tokens) * (1.0 - removed)));
}

// floor(total * weights[i] / sum of weights). Weights >= 0 with a sum below 2^63; total >= 0. All zero: all zero.
inline std::vector<std::int64_t> exact_floors(std::span<const std::int64_t> weights, std::int64_t total) {
  const std::int64_t sum = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  std::vector<std::int64_t> out(weights.size(), 0);
  if (sum > 0)
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = scaled_floor(total, weights[i], sum);
  return out;
}

// Splits `total` in proportion to the weights: floors first, then one more for the largest fractions, equal fractions
// to the lower index. caps (may be empty: none) bound each part; what a cap cuts off goes to the others in proportion
// to their weights. Where only zero weights are left, they share equally. The parts sum to min(total, sum of caps).
// weights >= 0 with a sum below 2^63, total >= 0. O(n^2) where caps bind one after the other, O(n log n) otherwise.
inline std::vector<std::int64_t> largest_remainder(std::span<const std::int64_t> weights, std::int64_t total,
                                                   std::span<const std::int64_t> caps = {}) {
  __extension__ using wide = __int128;
  const std::size_t n = weights.size();
  if (total < 0) fail_argument("largest_remainder: a total of ", total, " rows; 0 or more is required");
  if (!caps.empty() && caps.size() != n)
    fail_argument("largest_remainder: ", caps.size(), " caps for ", n, " weights; one each or none is required");
  for (const std::int64_t w : weights)
    if (w < 0) fail_argument("largest_remainder: weight ", w, "; 0 or more is required");

  std::vector<std::int64_t> out(n, 0), weight(weights.begin(), weights.end());
  std::vector<std::size_t> open(n);
  std::iota(open.begin(), open.end(), std::size_t{0});
  std::int64_t left = total, sum = 0;
  const auto add_up = [&] {
    sum = 0;
    for (const std::size_t i : open) sum += weight[i];
    if (sum > 0) return;
    for (const std::size_t i : open) weight[i] = 1;
    sum = static_cast<std::int64_t>(open.size());
  };
  add_up();
  for (bool cut = !caps.empty(); cut;) {
    // Every part that reaches its cap is settled; the shares of the others only grow by that, so this ends.
    const std::int64_t before = left, before_sum = sum;
    cut = std::erase_if(open, [&](std::size_t i) {
            if (static_cast<wide>(before) * weight[i] < static_cast<wide>(caps[i]) * before_sum) return false;
            left -= out[i] = caps[i];
            return true;
          }) > 0;
    add_up();
  }
  if (open.empty()) return out;

  std::vector<std::int64_t> remainder(n, 0);
  std::int64_t given = 0;
  for (const std::size_t i : open) {
    const wide share = static_cast<wide>(left) * weight[i];
    given += out[i] = static_cast<std::int64_t>(share / sum);
    remainder[i] = static_cast<std::int64_t>(share % sum);
  }
  std::stable_sort(open.begin(), open.end(), [&](std::size_t a, std::size_t b) { return remainder[a] > remainder[b]; });
  for (std::size_t i = 0; given < left; ++i, ++given) ++out[open[i]];
  return out;
}

// The same for real weights, finite and >= 0. They are taken as multiples of about 2^-61 / n of the largest, so that
// the comparison of fractions is exact again.
inline std::vector<std::int64_t> largest_remainder(std::span<const double> weights, std::int64_t total,
                                                   std::span<const std::int64_t> caps = {}) {
  double largest = 0;
  for (const double w : weights) {
    if (!std::isfinite(w) || w < 0)
      fail_argument("largest_remainder: weight ", w, "; a finite number >= 0 is required");
    largest = std::max(largest, w);
  }
  int exponent = 0, room = 0;
  std::frexp(largest, &exponent);
  std::frexp(static_cast<double>(weights.size()), &room);
  std::vector<std::int64_t> whole(weights.size());
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = std::llround(std::ldexp(weights[i], 61 - room - exponent));
  return largest_remainder(whole, total, caps);
}

// Raises every part below its minimum to it. Where the sum would exceed `total`, what is too much is taken row by row
// from the part with most rows (ties: lower index), never below its own minimum. Throws where the minima exceed total.
inline void raise_to_minimum(std::span<std::int64_t> rows, std::span<const std::int64_t> minimum, std::int64_t total) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) sum += rows[i] = std::max(rows[i], minimum[i]);
  for (; sum > total; --sum) {
    std::size_t from = rows.size();
    for (std::size_t i = 0; i < rows.size(); ++i)
      if (rows[i] > minimum[i] && (from == rows.size() || rows[i] > rows[from])) from = i;
    if (from == rows.size()) fail_argument("raise_to_minimum: the minima are ", sum, " rows, more than ", total);
    --rows[from];
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
