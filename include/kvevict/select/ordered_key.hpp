// Scores as signed integers in the same order, so that comparing, counting and bucketing are integer work that does
// not depend on the floating-point environment. Sign and magnitude become two's complement, so -0 and +0 share key 0.
#pragma once
#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>

#include "kvevict/core/half.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

template <CacheElement T>
struct KeyTraits;

template <>
struct KeyTraits<float> {
  using key_type = std::int32_t;
  static constexpr std::int32_t infinity = 0x7f800000;  // the largest key of a number
  static constexpr std::int32_t bits(float x) noexcept { return std::bit_cast<std::int32_t>(x); }
};
template <>
struct KeyTraits<fp16_t> {
  using key_type = std::int16_t;
  static constexpr std::int16_t infinity = 0x7c00;
  static constexpr std::int16_t bits(fp16_t x) noexcept { return static_cast<std::int16_t>(x.bits); }
};
template <>
struct KeyTraits<bf16_t> {
  using key_type = std::int16_t;
  static constexpr std::int16_t infinity = 0x7f80;
  static constexpr std::int16_t bits(bf16_t x) noexcept { return static_cast<std::int16_t>(x.bits); }
};

// The key of a score given by its bits: a < b as scores <=> key(a) < key(b), for everything but NaN.
template <std::signed_integral K>
constexpr K key_of_bits(K bits) noexcept {
  constexpr K magnitude = std::numeric_limits<K>::max();
  return static_cast<K>(bits < 0 ? -(bits & magnitude) : bits);
}

template <CacheElement T>
constexpr auto ordered_key(T score) noexcept {
  return key_of_bits(KeyTraits<T>::bits(score));
}

// Whether a key belongs to NaN: its magnitude lies above infinity's.
template <CacheElement T>
constexpr bool is_nan_key(typename KeyTraits<T>::key_type key) noexcept {
  return key > KeyTraits<T>::infinity || key < -KeyTraits<T>::infinity;
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
