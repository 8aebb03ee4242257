// Gumbel(0, 1) noise from a counter: the value of (seed, step, stream, token) is always the same, whatever was drawn
// before it, so training resumes to the same numbers and does not depend on the order of work.
#pragma once
#include <cmath>
#include <cstdint>

#include "kvevict/core/splitmix64.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What random numbers are drawn for; numbers of different streams are independent.
inline constexpr std::uint64_t parameter_stream = 1, draw_stream = 2, noise_stream = 3;

// Independent random bits and numbers of one purpose.
class CounterRandom {
 public:
  constexpr CounterRandom(std::uint64_t seed, std::uint64_t stream) noexcept
      : key_(detail::splitmix64(detail::splitmix64(seed) ^ stream)) {}

  constexpr std::uint64_t bits(std::uint64_t counter) const noexcept {
    return detail::splitmix64(key_ ^ detail::splitmix64(counter));
  }
  // In (0, 1), never an end.
  constexpr double uniform(std::uint64_t counter) const noexcept {
    return (static_cast<double>(bits(counter) >> 11) + 0.5) * 0x1p-53;
  }
  // A whole number in [0, below).
  constexpr std::uint64_t below(std::uint64_t counter, std::uint64_t limit) const noexcept {
    __extension__ using wide = unsigned __int128;
    return static_cast<std::uint64_t>((static_cast<wide>(bits(counter)) * limit) >> 64);
  }
  double gumbel(std::uint64_t counter) const noexcept { return -std::log(-std::log(uniform(counter))); }
  // Two numbers of the standard normal distribution are behind each pair of counters (Box and Muller).
  double normal(std::uint64_t counter) const noexcept {
    const double radius = std::sqrt(-2 * std::log(uniform(counter & ~std::uint64_t{1})));
    const double angle = 2 * 3.14159265358979323846 * uniform(counter | 1);
    return radius * ((counter & 1) != 0 ? std::sin(angle) : std::cos(angle));
  }

 private:
  std::uint64_t key_;
};

}  // namespace kvevict::inline KVEVICT_ABI
