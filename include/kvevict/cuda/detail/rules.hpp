// Arithmetic of the CUDA backend that can be wrong: fixed digits and error words. Host and device run the same
// functions, so that tests on any machine execute what the kernels execute.
#pragma once
#include <cstdint>

#include "kvevict/config.hpp"
#include "kvevict/core/arithmetic.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

using detail::bit_width;
using detail::ceil_div;
using detail::infinity_key;
using detail::is_nan_key;
using detail::KeyRange;
using detail::largest_key;
using detail::max;
using detail::min;
using detail::ordered_key;
using detail::round_up;
using detail::score_of_key;
using Threshold = detail::Threshold<index_t>;

// Fixed digits of 11, 11 and 10 bits, for rows that several CTAs share and whose range nobody knows beforehand.
struct FixedDigits {
  static constexpr int passes = 3, bins = 1 << 11;
  KVEVICT_HOST_DEVICE static constexpr int shift(int pass) noexcept { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
  KVEVICT_HOST_DEVICE static constexpr int bits(int pass) noexcept { return pass == 2 ? 10 : 11; }
  // Keys as unsigned integers of the same order.
  KVEVICT_HOST_DEVICE static constexpr std::uint32_t bits_of(std::int32_t key) noexcept {
    return static_cast<std::uint32_t>(key) ^ 0x80000000u;
  }
  KVEVICT_HOST_DEVICE static constexpr std::int32_t key_of(std::uint32_t bits) noexcept {
    return static_cast<std::int32_t>(bits ^ 0x80000000u);
  }
  KVEVICT_HOST_DEVICE static constexpr std::uint32_t digit(std::uint32_t bits, int pass) noexcept {
    return (bits >> shift(pass)) & ((1u << FixedDigits::bits(pass)) - 1u);
  }
  // Whether the digits before `pass` are those of `prefix`.
  KVEVICT_HOST_DEVICE static constexpr bool candidate(std::uint32_t bits, std::uint32_t prefix, int pass) noexcept {
    return pass == 0 || (bits ^ prefix) >> (shift(pass) + FixedDigits::bits(pass)) == 0;
  }
};

// The first thing that went wrong on the device: the smallest (row, token), so that it does not depend on timing.
// Row counts score rows in launch order; `fault` tells what it was.
enum class Fault : std::uint32_t { none, nan_score, bad_plan };
inline constexpr unsigned long long no_error = ~0ull;
KVEVICT_HOST_DEVICE constexpr unsigned long long error_word(Fault fault, std::int64_t row, index_t token) noexcept {
  return static_cast<unsigned long long>(row) << 34 | static_cast<unsigned long long>(fault) << 31 |
         static_cast<unsigned long long>(token);
}
KVEVICT_HOST_DEVICE constexpr Fault fault_of(unsigned long long word) noexcept {
  return word == no_error ? Fault::none : static_cast<Fault>(word >> 31 & 7u);
}
KVEVICT_HOST_DEVICE constexpr std::int64_t row_of(unsigned long long word) noexcept {
  return static_cast<std::int64_t>(word >> 34);
}
KVEVICT_HOST_DEVICE constexpr index_t token_of(unsigned long long word) noexcept {
  return static_cast<index_t>(word & 0x7fffffffu);
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
