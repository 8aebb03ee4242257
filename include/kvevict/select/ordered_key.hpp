// Scores as signed integers in the same order, so that comparing, counting and bucketing are integer work that does
// not depend on the floating-point environment. Sign and magnitude become two's complement, so -0 and +0 share key 0.
// Host and device run the same functions.
#pragma once
#include <concepts>
#include <cstdint>

#include "kvevict/core/arithmetic.hpp"
#include "kvevict/core/half.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

template <CacheElement T>
struct KeyTraits;

template <>
struct KeyTraits<float> {
  using key_type = std::int32_t;
  static constexpr std::int32_t infinity = 0x7f800000;  // the largest key of a number
  KVEVICT_HOST_DEVICE static constexpr std::int32_t bits(float x) noexcept {
    return static_cast<std::int32_t>(bits_of(x));
  }
};
template <>
struct KeyTraits<fp16_t> {
  using key_type = std::int16_t;
  static constexpr std::int16_t infinity = 0x7c00;
  KVEVICT_HOST_DEVICE static constexpr std::int16_t bits(fp16_t x) noexcept {
    return static_cast<std::int16_t>(x.bits);
  }
};
template <>
struct KeyTraits<bf16_t> {
  using key_type = std::int16_t;
  static constexpr std::int16_t infinity = 0x7f80;
  KVEVICT_HOST_DEVICE static constexpr std::int16_t bits(bf16_t x) noexcept {
    return static_cast<std::int16_t>(x.bits);
  }
};

inline constexpr std::int32_t infinity_key = KeyTraits<float>::infinity;
inline constexpr std::int32_t largest_key = 0x7fffffff;

// The key of a score given by its bits: a < b as scores <=> key(a) < key(b), for everything but NaN.
template <std::signed_integral K>
KVEVICT_HOST_DEVICE constexpr K key_of_bits(K bits) noexcept {
  constexpr K magnitude = static_cast<K>((std::uint64_t{1} << (8 * sizeof(K) - 1)) - 1);
  return static_cast<K>(bits < 0 ? -(bits & magnitude) : bits);
}

template <CacheElement T>
KVEVICT_HOST_DEVICE constexpr auto ordered_key(T score) noexcept {
  return key_of_bits(KeyTraits<T>::bits(score));
}

// The score with this key; keys of NaN give one as well.
KVEVICT_HOST_DEVICE constexpr float score_of_key(std::int32_t key) noexcept {
  return float_of(key < 0 ? (0u - static_cast<std::uint32_t>(key)) | 0x80000000u : static_cast<std::uint32_t>(key));
}

// Whether a key belongs to NaN: its magnitude lies above infinity's.
template <CacheElement T = float>
KVEVICT_HOST_DEVICE constexpr bool is_nan_key(typename KeyTraits<T>::key_type key) noexcept {
  return key > KeyTraits<T>::infinity || key < -KeyTraits<T>::infinity;
}

// Tests of the bits, which compilers do not fold away however they were told to treat NaN.
KVEVICT_HOST_DEVICE constexpr bool is_nan_score(float x) noexcept { return is_nan_key(ordered_key(x)); }
KVEVICT_HOST_DEVICE constexpr bool is_finite_score(float x) noexcept {
  return (bits_of(x) & 0x7f800000u) != 0x7f800000u;
}

// Which entries are taken: all above `key`, and the first `ties` that equal it.
template <class Count>
struct Threshold {
  std::int32_t key = 0;
  Count ties = 0;

  KVEVICT_HOST_DEVICE constexpr bool above(std::int32_t k) const noexcept { return k > key; }
  KVEVICT_HOST_DEVICE constexpr bool equal(std::int32_t k) const noexcept { return k == key; }
};

// Closed interval of keys, which holds a cut that is looked for, and its digits relative to the lower end: they adapt
// to the data, so that bins fill evenly and a range of one value needs no pass at all.
struct KeyRange {
  static constexpr int digit_bits = 11, bins = 1 << digit_bits;
  std::int32_t lo, hi;

  KVEVICT_HOST_DEVICE constexpr std::uint32_t width() const noexcept {
    return static_cast<std::uint32_t>(hi) - static_cast<std::uint32_t>(lo);
  }
  KVEVICT_HOST_DEVICE constexpr bool holds(std::int32_t key) const noexcept { return lo <= key && key <= hi; }
  KVEVICT_HOST_DEVICE constexpr int shift(int bits = digit_bits) const noexcept {
    return max(0, bit_width(width()) - bits);
  }
  KVEVICT_HOST_DEVICE constexpr std::uint32_t digit(std::int32_t key, int shift) const noexcept {
    return (static_cast<std::uint32_t>(key) - static_cast<std::uint32_t>(lo)) >> shift;
  }
  KVEVICT_HOST_DEVICE constexpr KeyRange of_digit(std::uint32_t digit, int shift) const noexcept {
    const std::uint32_t first = static_cast<std::uint32_t>(lo) + (digit << shift);
    const std::uint32_t room = static_cast<std::uint32_t>(hi) - first, span = (std::uint32_t{1} << shift) - 1;
    return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(first + min(room, span))};
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
