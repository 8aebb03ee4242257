// Cosines and sines of rotary embeddings, computed once and used for many rows: the one place where pairs are rotated.
#pragma once
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvevict/core/shape.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// f(i, first, second) for every pair i and its two elements.
template <class F>
void for_pairs(RopeStyle style, index_t pairs, F&& f) {
  if (style == RopeStyle::half) {
    for (index_t i = 0; i < pairs; ++i) f(i, i, i + pairs);
  } else {
    for (index_t i = 0; i < pairs; ++i) f(i, 2 * i, 2 * i + 1);
  }
}

template <std::floating_point T>
constexpr void rotate_pair(T& a, T& b, T cosine, T sine) noexcept {
  const T x = a, y = b;
  a = x * cosine - y * sine;
  b = y * cosine + x * sine;
}
template <std::floating_point T>
constexpr void rotate_pair_inverse(T& a, T& b, T cosine, T sine) noexcept {
  const T x = a, y = b;
  a = x * cosine + y * sine;
  b = y * cosine - x * sine;
}

}  // namespace detail

// How an angle, position * frequency, is computed. Models are trained and run with angles rounded to float32; a
// rotation is undone, or moved to other positions, with exact ones.
enum class RopeAngle { float32, float64 };

// Rows of cosines and sines in T, each of one position.
template <std::floating_point T, RopeAngle Angle>
class RopeTable {
 public:
  index_t rows() const noexcept { return rows_; }
  void clear() noexcept {
    rows_ = 0;
    table_.clear();
  }
  // Appends the row of a position; `factor` is multiplied into it. All rows of a table have the same rope.
  void add(const Rope& rope, std::int64_t position, double factor) {
    style_ = rope.style;
    pairs_ = static_cast<index_t>(rope.inv_freq.size());
    const auto angle = [&](float frequency) {
      if constexpr (Angle == RopeAngle::float32) return static_cast<double>(static_cast<float>(position) * frequency);
      else return static_cast<double>(position) * static_cast<double>(frequency);
    };
    for (const float f : rope.inv_freq) table_.push_back(static_cast<T>(factor * std::cos(angle(f))));
    for (const float f : rope.inv_freq) table_.push_back(static_cast<T>(factor * std::sin(angle(f))));
    ++rows_;
  }

  const T* cosines(index_t row) const noexcept { return table_.data() + std::int64_t{2} * row * pairs_; }
  const T* sines(index_t row) const noexcept { return cosines(row) + pairs_; }

  // Rotates one head's row x in place, or rotates it back by the transposed rotation.
  void rotate(index_t row, T* x) const noexcept {
    const T *c = cosines(row), *s = sines(row);
    detail::for_pairs(style_, pairs_,
                      [=](index_t i, index_t a, index_t b) { detail::rotate_pair(x[a], x[b], c[i], s[i]); });
  }
  void rotate_inverse(index_t row, T* x) const noexcept {
    const T *c = cosines(row), *s = sines(row);
    detail::for_pairs(style_, pairs_,
                      [=](index_t i, index_t a, index_t b) { detail::rotate_pair_inverse(x[a], x[b], c[i], s[i]); });
  }

 private:
  RopeStyle style_ = RopeStyle::half;
  index_t pairs_ = 0, rows_ = 0;
  std::vector<T> table_;  // [row][cosines, sines][pairs]
};

// The inverse of the rotation at any position up to a last one, for many rows: position = 64 a + b, and the rotations
// of two small tables are joined by one complex product. The error is below 2e-7 of a row's norm, far below what a
// float32 model rounds its own angles by.
class InverseRotation {
 public:
  // last_position: the largest position that will be asked for; 0 or more. O(rotary_dim * last_position / 64).
  InverseRotation(const Rope& rope, index_t last_position)
      : style_(rope.style), pairs_(static_cast<index_t>(rope.inv_freq.size())) {
    for (index_t i = 0; i <= last_position / step; ++i) coarse_.add(rope, std::int64_t{i} * step, 1.0);
    for (index_t i = 0; i < step; ++i) fine_.add(rope, i, 1.0 / static_cast<double>(rope.attention_factor));
  }

  void apply(index_t position, float* x) const noexcept {
    const float *ac = coarse_.cosines(position / step), *as = coarse_.sines(position / step);
    const float *bc = fine_.cosines(position % step), *bs = fine_.sines(position % step);
    detail::for_pairs(style_, pairs_, [=](index_t i, index_t a, index_t b) {
      const float c = ac[i] * bc[i] - as[i] * bs[i], s = as[i] * bc[i] + ac[i] * bs[i];
      detail::rotate_pair_inverse(x[a], x[b], c, s);
    });
  }

 private:
  static constexpr index_t step = 64;
  RopeStyle style_;
  index_t pairs_;
  RopeTable<float, RopeAngle::float64> coarse_, fine_;
};

}  // namespace kvevict::inline KVEVICT_ABI
