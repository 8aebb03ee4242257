// Arithmetic on rows of floats, for scorers. Sums go to a fixed number of partial sums, so that compilers vectorise
// them and every number of threads gives the same bits.
#pragma once
#include <cmath>
#include <span>

#include "kvevict/core/shape.hpp"
#include "kvevict/score/detail/row_math.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// a . b of two rows of equal length, in float32.
inline float dot(std::span<const float> a, std::span<const float> b) {
  return kvevict::detail::dot(a.data(), b.data(), static_cast<index_t>(a.size()));
}

// The same in float64.
inline double dot_double(std::span<const float> a, std::span<const float> b) {
  return kvevict::detail::dot_double(a.data(), b.data(), static_cast<index_t>(a.size()));
}

// |a|_2, in float32.
inline float norm(std::span<const float> a) { return std::sqrt(dot(a, a)); }

}  // namespace kvevict::inline KVEVICT_ABI::score
