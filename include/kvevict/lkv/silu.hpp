// SiLU, x / (1 + e^-x): the activation of both LKV networks, with its derivative.
#pragma once
#include <cmath>
#include <concepts>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

template <std::floating_point T>
T silu(T x) noexcept {
  return x / (1 + std::exp(-x));
}

// d silu / dx.
template <std::floating_point T>
T silu_slope(T x) noexcept {
  const T s = 1 / (1 + std::exp(-x));
  return s * (1 + x * (1 - s));
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
