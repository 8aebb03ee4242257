// Integer arithmetic that host and device code share; the standard library's is not for device code.
#pragma once
#include <cstdint>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

// floor(whole * part / parts) without overflow for whole * part < 2^127. parts > 0.
KVEVICT_HOST_DEVICE constexpr std::int64_t scaled_floor(std::int64_t whole, std::int64_t part,
                                                        std::int64_t parts) noexcept {
  __extension__ using wide = __int128;
  return static_cast<std::int64_t>(static_cast<wide>(whole) * part / parts);
}

namespace detail {

template <class T>
KVEVICT_HOST_DEVICE constexpr T min(T a, T b) noexcept {
  return b < a ? b : a;
}
template <class T>
KVEVICT_HOST_DEVICE constexpr T max(T a, T b) noexcept {
  return a < b ? b : a;
}
// a, b > 0.
template <class T>
KVEVICT_HOST_DEVICE constexpr T ceil_div(T a, T b) noexcept {
  return (a + b - 1) / b;
}
// The next multiple of b.
template <class T>
KVEVICT_HOST_DEVICE constexpr T round_up(T a, T b) noexcept {
  return ceil_div(a, b) * b;
}
// Bits that x needs; 0 for 0.
KVEVICT_HOST_DEVICE constexpr int bit_width(std::uint32_t x) noexcept {
  int width = 0;
  for (int step = 16; step > 0; step /= 2)
    if (x >> step != 0) {
      x >>= step;
      width += step;
    }
  return width + static_cast<int>(x);
}

}  // namespace detail
}  // namespace kvevict::inline KVEVICT_ABI
