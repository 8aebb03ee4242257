// Storage types fp16_t (IEEE binary16) and bf16_t (upper half of a float). They hold bits, they do not compute:
// arithmetic is float. Conversions round to nearest, ties to even, in software, so that every platform agrees.
#pragma once
#include <concepts>
#include <cstdint>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct fp16_t {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(fp16_t, fp16_t) = default;  // equal bits, not equal values
};

struct bf16_t {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bf16_t, bf16_t) = default;
};

// What a cache may hold.
template <class T>
concept CacheElement = std::same_as<T, float> || std::same_as<T, fp16_t> || std::same_as<T, bf16_t>;

namespace detail {
// std::bit_cast, which device code may not call.
KVEVICT_HOST_DEVICE constexpr float float_of(std::uint32_t bits) noexcept { return __builtin_bit_cast(float, bits); }
KVEVICT_HOST_DEVICE constexpr std::uint32_t bits_of(float x) noexcept { return __builtin_bit_cast(std::uint32_t, x); }
}  // namespace detail

KVEVICT_HOST_DEVICE constexpr float to_float(float x) noexcept { return x; }
KVEVICT_HOST_DEVICE constexpr float to_float(bf16_t x) noexcept {
  return detail::float_of(static_cast<std::uint32_t>(x.bits) << 16);
}
KVEVICT_HOST_DEVICE constexpr float to_float(fp16_t x) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity and NaN keep their payload
    return detail::float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return detail::float_of(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: the value is magnitude * 2^-24, exact in float.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return detail::float_of(sign | detail::bits_of(value));
}

// Nearest value of T; ties to even; too large becomes infinity; NaN stays NaN (quiet).
template <CacheElement T>
KVEVICT_HOST_DEVICE constexpr T from_float(float x) noexcept {
  const std::uint32_t bits = detail::bits_of(x);
  if constexpr (std::same_as<T, float>) {
    return x;
  } else if constexpr (std::same_as<T, bf16_t>) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
    return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  } else {
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
    if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and above
    if (magnitude < 0x38800000u) {  // below 2^-14: the result is a multiple of 2^-24
      // Adding 0.5 puts the unit of the last place at 2^-24, so the addition itself rounds to even.
      const float shifted = detail::float_of(magnitude) + 0.5f;
      return {static_cast<std::uint16_t>(sign | (detail::bits_of(shifted) - 0x3f000000u))};
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
  }
}

// The name of an element type in messages and file headers.
template <CacheElement T>
constexpr const char* element_name() noexcept {
  return std::same_as<T, float> ? "f32" : std::same_as<T, fp16_t> ? "f16" : "bf16";
}

}  // namespace kvevict::inline KVEVICT_ABI
