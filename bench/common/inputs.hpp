// Score arrays for benchmarks: what attention scores look like, and what is hard for a selection.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "kvevict/core/half.hpp"

namespace kvevict::bench {

enum class Scores {
  lognormal,   // heavy-tailed, as attention mass is (sigma 2)
  uniform,     // [0, 1)
  maxpooled,   // lognormal after a running maximum of width 7: runs of equal values
  rounded,     // lognormal rounded to bfloat16: many ties
  ascending,   // sorted
  descending,  // sorted the other way
  equal,       // one value
  two_values,  // 1 and 2, mixed
  denormal,    // below the smallest normal float
  infinite,    // -inf, numbers and +inf, mixed
  spikes       // small noise with large values 1/64 and 1/128 of the length apart: the stride of a regular sample
};

constexpr std::string_view name_of(Scores s) noexcept {
  constexpr std::string_view names[] = {"lognormal", "uniform",   "maxpooled", "rounded",  "ascending", "descending",
                                        "equal",     "twovalues", "denormal",  "infinite", "spikes"};
  return names[static_cast<std::size_t>(s)];
}

// n scores; the same for the same seed.
inline std::vector<float> make_scores(Scores kind, std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<float> lognormal(0.f, 2.f);
  std::uniform_real_distribution<float> uniform(0.f, 1.f);
  std::vector<float> out(n);
  const bool heavy = kind == Scores::lognormal || kind == Scores::maxpooled || kind == Scores::rounded;
  for (float& x : out) x = heavy ? lognormal(random) : uniform(random);
  switch (kind) {
    case Scores::maxpooled: {
      const std::vector<float> raw = out;
      for (std::size_t i = 0; i < n; ++i)
        out[i] = *std::max_element(raw.begin() + static_cast<std::ptrdiff_t>(i < 3 ? 0 : i - 3),
                                   raw.begin() + static_cast<std::ptrdiff_t>(std::min(n, i + 4)));
      break;
    }
    case Scores::rounded:
      for (float& x : out) x = to_float(from_float<bf16_t>(x));
      break;
    case Scores::ascending:
      std::sort(out.begin(), out.end());
      break;
    case Scores::descending:
      std::sort(out.begin(), out.end(), [](float a, float b) { return a > b; });
      break;
    case Scores::equal:
      std::fill(out.begin(), out.end(), 0.25f);
      break;
    case Scores::two_values:
      for (float& x : out) x = x < 0.85f ? 1.f : 2.f;
      break;
    case Scores::denormal:
      for (float& x : out) x *= std::numeric_limits<float>::min();
      break;
    case Scores::infinite:
      for (float& x : out) {
        const float infinity = std::numeric_limits<float>::infinity();
        x = x < 0.3f ? -infinity : x > 0.9f ? infinity : x;
      }
      break;
    case Scores::spikes:
      for (std::size_t i = 0; i < n; ++i) {
        const bool spike = i % std::max<std::size_t>(1, n / 64) == 0 || i % std::max<std::size_t>(1, n / 128) == 1;
        out[i] = spike ? 100.f + out[i] : out[i] * 0.01f;
      }
      break;
    default:
      break;
  }
  return out;
}

// How many different arrays of n scores a timing loop goes through: one array alone would be learnt by the branch
// predictor. At least 64 while they are small.
constexpr std::size_t rotation(std::size_t n) noexcept {
  return std::clamp<std::size_t>((std::size_t{1} << 20) / std::max<std::size_t>(n, 1), 4, 64);
}

}  // namespace kvevict::bench
