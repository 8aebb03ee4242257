// Rotations of rows by their positions: rotate, rotate back, shift to other positions, mean. Both pairings, partial
// rotary dimensions, attention factor. Angles are computed in float64, rows in float32, so a row moved by shift()
// equals one rotated at the new position within 1e-5 of its length in float32, and within one rounding per move where
// rows are half precision.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/rope/rope.hpp"
#include "kvevict/rope/rope_table.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Throws std::invalid_argument unless `rope` describes a rotation of rows of `dim` elements.
inline void check_rope(std::string_view who, const Rope& rope, index_t dim) {
  if (rope.rotary_dim < 0 || rope.rotary_dim % 2 != 0 || rope.rotary_dim > dim)
    fail_argument(who, ": rotary_dim ", rope.rotary_dim, "; an even number up to the head dimension ", dim,
                  " is required");
  if (std::ssize(rope.inv_freq) != rope.rotary_dim / 2)
    fail_argument(who, ": ", rope.inv_freq.size(), " inverse frequencies for rotary_dim ", rope.rotary_dim, "; ",
                  rope.rotary_dim / 2, " are required");
  if (!std::isfinite(rope.attention_factor) || rope.attention_factor <= 0)
    fail_argument(who, ": attention_factor ", rope.attention_factor, "; a positive number is required");
}

// Rows can be moved to other positions: their rotation is a function of one position and is known.
inline bool can_shift(const Rope& rope) noexcept { return rope.no_shift.empty() && !rope.inv_freq.empty(); }

namespace detail {

// Rotates row r by angles steps(r) * inv_freq and multiplies by `factor`. steps: [rows].
template <CacheElement T, class Steps>
void rotate_rows(const Rope& rope, Rows<T> rows, Steps steps, double factor) {
  RopeTable<float, RopeAngle::float64> table;
  std::int64_t last = 0;
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    const std::int64_t step = steps(static_cast<std::size_t>(r));
    if (table.rows() == 0 || step != last) {  // a uniform shift needs its angles once
      table.clear();
      table.add(rope, step, factor);
      last = step;
    }
    if (step == 0 && factor == 1.0) continue;  // bits unchanged
    for_pairs(rope.style, rope.rotary_dim / 2, [&](index_t i, index_t first, index_t second) {
      float a = to_float(rows.at(r, first)), b = to_float(rows.at(r, second));
      rotate_pair(a, b, table.cosines(0)[i], table.sines(0)[i]);
      rows.at(r, first) = from_float<T>(a);
      rows.at(r, second) = from_float<T>(b);
    });
  }
}

template <class T>
void check_rotation(std::string_view who, const Rope& rope, const Rows<T>& rows, std::size_t positions) {
  check_rope(who, rope, rows.cols);
  if (rows.rows != static_cast<std::int64_t>(positions))
    fail_argument(who, ": ", positions, " positions for ", rows.rows, " rows; one each is required");
}

}  // namespace detail

// Rotates rows in place as the model does at these positions. rows: [n][dim]; positions: [n]. Elements from rotary_dim
// on are left alone. O(n * rotary_dim).
template <CacheElement T>
void rotate(const Rope& rope, Rows<T> rows, std::span<const index_t> positions) {
  detail::check_rotation("rotate", rope, rows, positions.size());
  detail::rotate_rows(
      rope, rows, [&](std::size_t r) { return std::int64_t{positions[r]}; },
      static_cast<double>(rope.attention_factor));
}

// The inverse of rotate(): rows as they were before RoPE.
template <CacheElement T>
void rotate_inverse(const Rope& rope, Rows<T> rows, std::span<const index_t> positions) {
  detail::check_rotation("rotate_inverse", rope, rows, positions.size());
  detail::rotate_rows(
      rope, rows, [&](std::size_t r) { return -std::int64_t{positions[r]}; },
      1.0 / static_cast<double>(rope.attention_factor));
}

// Moves rotated rows from positions `from` to positions `to`; a row that does not move keeps its bits. The attention
// factor is in the rows already and is not applied again. Throws std::invalid_argument naming the reason where the rows
// cannot be moved (rope.no_shift).
template <CacheElement T>
void shift(const Rope& rope, Rows<T> rows, std::span<const index_t> from, std::span<const index_t> to) {
  if (!rope.no_shift.empty()) fail_argument("shift: these rows cannot be moved: ", rope.no_shift);
  detail::check_rotation("shift", rope, rows, from.size());
  detail::check_rotation("shift", rope, rows, to.size());
  detail::rotate_rows(
      rope, rows, [&](std::size_t r) { return std::int64_t{to[r]} - from[r]; }, 1.0);
}

// The mean of the rotations at positions [first, first + count), attention factor included: what an unrotated vector
// becomes on average there. No rotation itself: it shortens.
class MeanRotation {
 public:
  MeanRotation(const Rope& rope, std::int64_t first, index_t count) : style_(rope.style) {
    for (const float f : rope.inv_freq) {
      // A geometric sum: sum of e^(i p f) = e^(i f (first + (count - 1) / 2)) * sin(count f / 2) / sin(f / 2).
      const double half = 0.5 * static_cast<double>(f), sine = std::sin(half);
      const double length = sine == 0 ? 1.0 : std::sin(count * half) / (count * sine);
      const double middle = static_cast<double>(2 * first + count - 1) * half;
      const double factor = static_cast<double>(rope.attention_factor) * length;
      cosines_.push_back(factor * std::cos(middle));
      sines_.push_back(factor * std::sin(middle));
    }
  }

  // x: elements 0, stride, 2 stride, ... of a vector of at least rotary_dim elements.
  void apply(double* x, index_t stride) const noexcept {
    detail::for_pairs(style_, static_cast<index_t>(cosines_.size()), [&](index_t i, index_t a, index_t b) {
      const auto at = static_cast<std::size_t>(i);
      detail::rotate_pair(x[std::int64_t{a} * stride], x[std::int64_t{b} * stride], cosines_[at], sines_[at]);
    });
  }

 private:
  RopeStyle style_;
  std::vector<double> cosines_, sines_;
};

}  // namespace kvevict::inline KVEVICT_ABI
