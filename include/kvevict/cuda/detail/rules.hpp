// The arithmetic of the CUDA backend that can be wrong: keys, digits, ties, rounding, error words. Host and device run
// the same functions, so that tests on any machine execute what the kernels execute.
#pragma once
#include <cstdint>

#include "kvevict/config.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// ---- small integers; the standard library's are not device functions ----
template <class T>
KVEVICT_HOST_DEVICE constexpr T least(T a, T b) noexcept {
  return b < a ? b : a;
}
template <class T>
KVEVICT_HOST_DEVICE constexpr T most(T a, T b) noexcept {
  return a < b ? b : a;
}
template <class T>
KVEVICT_HOST_DEVICE constexpr T ceil_div(T a, T b) noexcept {
  return (a + b - 1) / b;
}
template <class T>
KVEVICT_HOST_DEVICE constexpr T round_up(T a, T b) noexcept {
  return ceil_div(a, b) * b;
}
KVEVICT_HOST_DEVICE constexpr int bit_width(std::uint32_t x) noexcept {
  int width = 0;
  for (int step = 16; step > 0; step /= 2)
    if (x >> step != 0) {
      x >>= step;
      width += step;
    }
  return width + static_cast<int>(x);
}

// ---- ordered keys ----
inline constexpr std::int32_t infinity_key = 0x7f800000;
inline constexpr std::int32_t largest_key = 0x7fffffff;

// A score as an integer of the same order; -0 and +0 are both 0.
KVEVICT_HOST_DEVICE constexpr std::int32_t ordered_key(float score) noexcept {
  const std::uint32_t bits = detail::bits_of(score), magnitude = bits & 0x7fffffffu;
  return static_cast<std::int32_t>((bits >> 31) != 0 ? 0u - magnitude : magnitude);
}
KVEVICT_HOST_DEVICE constexpr float score_of_key(std::int32_t key) noexcept {
  return detail::float_of(key < 0 ? (0u - static_cast<std::uint32_t>(key)) | 0x80000000u
                                  : static_cast<std::uint32_t>(key));
}
KVEVICT_HOST_DEVICE constexpr bool is_nan_key(std::int32_t key) noexcept {
  return key > infinity_key || key < -infinity_key;
}

// Which entries are taken: all above `key`, and the first `ties` that equal it.
struct Threshold {
  std::int32_t key;
  index_t ties;

  KVEVICT_HOST_DEVICE constexpr bool above(std::int32_t k) const noexcept { return k > key; }
  KVEVICT_HOST_DEVICE constexpr bool equal(std::int32_t k) const noexcept { return k == key; }
};

// Radix digits relative to the range [lo, hi] that still holds the cut: the digits adapt to the data, so that the bins
// fill evenly and ranges of one value need no pass at all.
struct KeyRange {
  static constexpr int digit_bits = 11, bins = 1 << digit_bits;
  std::int32_t lo, hi;

  KVEVICT_HOST_DEVICE constexpr std::uint32_t width() const noexcept {
    return static_cast<std::uint32_t>(hi) - static_cast<std::uint32_t>(lo);
  }
  KVEVICT_HOST_DEVICE constexpr int shift() const noexcept { return most(0, bit_width(width()) - digit_bits); }
  KVEVICT_HOST_DEVICE constexpr bool holds(std::int32_t key) const noexcept { return lo <= key && key <= hi; }
  KVEVICT_HOST_DEVICE constexpr std::uint32_t digit(std::int32_t key, int shift) const noexcept {
    return (static_cast<std::uint32_t>(key) - static_cast<std::uint32_t>(lo)) >> shift;
  }
  KVEVICT_HOST_DEVICE constexpr KeyRange of_digit(std::uint32_t digit, int shift) const noexcept {
    const std::uint32_t first = static_cast<std::uint32_t>(lo) + (digit << shift);
    const std::uint32_t room = static_cast<std::uint32_t>(hi) - first, span = (std::uint32_t{1} << shift) - 1;
    return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(first + least(room, span))};
  }
};

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

// ---- errors ----
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

// ---- rounding ----
__extension__ using wide = unsigned __int128;

// floor(whole * part / parts), all >= 0, parts > 0.
KVEVICT_HOST_DEVICE constexpr std::int64_t floor_share(std::int64_t whole, std::int64_t part,
                                                       std::int64_t parts) noexcept {
  return static_cast<std::int64_t>(static_cast<wide>(whole) * static_cast<wide>(part) / static_cast<wide>(parts));
}
// What the floor cut off, in units of 1 / parts.
KVEVICT_HOST_DEVICE constexpr std::int64_t share_remainder(std::int64_t whole, std::int64_t part,
                                                           std::int64_t parts) noexcept {
  return static_cast<std::int64_t>(static_cast<wide>(whole) * static_cast<wide>(part) % static_cast<wide>(parts));
}
// Largest remainder: whether part i comes before part j when left-over rows are handed out.
KVEVICT_HOST_DEVICE constexpr bool before_by_remainder(std::int64_t remainder_i, std::int64_t i,
                                                       std::int64_t remainder_j, std::int64_t j) noexcept {
  return remainder_i != remainder_j ? remainder_i > remainder_j : i < j;
}

// Ada-KV: rows of a head set aside before scores decide, where `total` rows go to `heads` heads: at most ceil(m / 2)
// with protect=half, floor(m) with protect=full, m = total / heads.
KVEVICT_HOST_DEVICE constexpr ProtectedRows set_aside(Protect protect, index_t tokens, std::int64_t total,
                                                      std::int64_t heads) noexcept {
  const std::int64_t cap =
      protect.share == ProtectShare::half ? ceil_div(total, 2 * heads) : most<std::int64_t>(1, total / heads);
  return protect_at_most(protect_asked(protect, tokens), static_cast<index_t>(least<std::int64_t>(cap, tokens)));
}
// Rows that every head keeps, max(1, floor(floor * m)), with the floor in millionths.
KVEVICT_HOST_DEVICE constexpr std::int64_t ada_reserve(std::int64_t total, std::int64_t heads,
                                                       std::int64_t millionths) noexcept {
  return most<std::int64_t>(1, floor_share(total, millionths, heads * 1'000'000));
}
// Best scored rows that are reserved in a head on top of what was set aside.
KVEVICT_HOST_DEVICE constexpr index_t ada_least(std::int64_t reserve, index_t tokens, ProtectedRows aside) noexcept {
  return static_cast<index_t>(most<std::int64_t>(0, least<std::int64_t>(reserve, tokens) - aside.count()));
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
