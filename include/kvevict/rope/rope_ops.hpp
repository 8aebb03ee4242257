// Turning rows by their positions: rotate, turn back, move to other positions. Both pairings, partial rotary
// dimensions, attention factor. Angles are computed in float64, rows in float32, so a row moved by shift() equals one
// rotated at the new position within 1e-5 of its length in float32, and within one rounding per move where rows are
// half precision.
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

// Elements of pair i.
constexpr index_t rope_first(const Rope& rope, index_t i) noexcept { return rope.style == RopeStyle::half ? i : 2 * i; }
constexpr index_t rope_second(const Rope& rope, index_t i) noexcept {
  return rope.style == RopeStyle::half ? i + rope.rotary_dim / 2 : 2 * i + 1;
}

// Turns row r by angles steps(r) * inv_freq and multiplies by `factor`. steps: [rows].
template <CacheElement T, class Steps>
void turn_rows(const Rope& rope, Rows<T> rows, Steps steps, double factor) {
  const index_t pairs = rope.rotary_dim / 2;
  std::vector<float> cosines(static_cast<std::size_t>(pairs)), sines(cosines.size());
  bool known = false;
  std::int64_t last = 0;
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    const std::int64_t step = steps(static_cast<std::size_t>(r));
    if (!known || step != last)  // a uniform shift needs its angles once
      for (index_t i = 0; i < pairs; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double angle = static_cast<double>(step) * static_cast<double>(rope.inv_freq[at]);
        cosines[at] = static_cast<float>(factor * std::cos(angle));
        sines[at] = static_cast<float>(factor * std::sin(angle));
      }
    known = true;
    last = step;
    if (step == 0 && factor == 1.0) continue;  // bits unchanged
    for (index_t i = 0; i < pairs; ++i) {
      T& a = rows.at(r, rope_first(rope, i));
      T& b = rows.at(r, rope_second(rope, i));
      const float x = to_float(a), y = to_float(b), c = cosines[static_cast<std::size_t>(i)],
                  s = sines[static_cast<std::size_t>(i)];
      a = from_float<T>(x * c - y * s);
      b = from_float<T>(y * c + x * s);
    }
  }
}

template <class T>
void check_turn(std::string_view who, const Rope& rope, const Rows<T>& rows, std::size_t positions) {
  check_rope(who, rope, rows.cols);
  if (rows.rows != static_cast<std::int64_t>(positions))
    fail_argument(who, ": ", positions, " positions for ", rows.rows, " rows; one each is required");
}

}  // namespace detail

// Rotates rows in place as the model does at these positions. rows: [n][dim]; positions: [n]. Elements from rotary_dim
// on are left alone. O(n * rotary_dim).
template <CacheElement T>
void rotate(const Rope& rope, Rows<T> rows, std::span<const index_t> positions) {
  detail::check_turn("rotate", rope, rows, positions.size());
  detail::turn_rows(
      rope, rows, [&](std::size_t r) { return std::int64_t{positions[r]}; },
      static_cast<double>(rope.attention_factor));
}

// The inverse of rotate(): rows as they were before RoPE.
template <CacheElement T>
void unrotate(const Rope& rope, Rows<T> rows, std::span<const index_t> positions) {
  detail::check_turn("unrotate", rope, rows, positions.size());
  detail::turn_rows(
      rope, rows, [&](std::size_t r) { return -std::int64_t{positions[r]}; },
      1.0 / static_cast<double>(rope.attention_factor));
}

// Moves rotated rows from positions `from` to positions `to`; a row that does not move keeps its bits. The attention
// factor is in the rows already and is not applied again. Throws std::invalid_argument naming the reason where the rows
// cannot be moved (rope.no_shift).
template <CacheElement T>
void shift(const Rope& rope, Rows<T> rows, std::span<const index_t> from, std::span<const index_t> to) {
  if (!rope.no_shift.empty()) fail_argument("shift: these rows cannot be moved: ", rope.no_shift);
  detail::check_turn("shift", rope, rows, from.size());
  detail::check_turn("shift", rope, rows, to.size());
  detail::turn_rows(
      rope, rows, [&](std::size_t r) { return std::int64_t{to[r]} - from[r]; }, 1.0);
}

// The mean of the rotations at positions [first, first + count), attention factor included: what an unrotated vector
// becomes on average there. No rotation itself: it shortens.
class MeanRotation {
 public:
  MeanRotation(const Rope& rope, std::int64_t first, index_t count) : rope_(rope) {
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
    for (std::size_t i = 0; i < cosines_.size(); ++i) {
      double& a = x[std::int64_t{detail::rope_first(rope_, static_cast<index_t>(i))} * stride];
      double& b = x[std::int64_t{detail::rope_second(rope_, static_cast<index_t>(i))} * stride];
      const double x0 = a, y0 = b;
      a = x0 * cosines_[i] - y0 * sines_[i];
      b = y0 * cosines_[i] + x0 * sines_[i];
    }
  }

 private:
  Rope rope_;
  std::vector<double> cosines_, sines_;
};

}  // namespace kvevict::inline KVEVICT_ABI
