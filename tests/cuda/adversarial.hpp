// Score rows that selection gets wrong when it can: ties in every place, runs, zeros of both signs, infinities,
// denormals, one value, sorted rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kvevict/core/half.hpp"

namespace kvevict::emulation {

inline constexpr const char* adversarial_names[] = {
    "lognormal",      "uniform",   "all equal",           "two values", "runs of equal maxima", "ascending",
    "descending",     "denormals", "zeros of both signs", "infinities", "rounded to bf16",      "one outlier",
    "small integers", "negative"};
inline constexpr int adversarial_count = static_cast<int>(std::size(adversarial_names));

inline std::vector<float> adversarial(int kind, int n, unsigned seed) {
  std::mt19937 random(seed * 97 + static_cast<unsigned>(kind));
  std::vector<float> x(static_cast<std::size_t>(n));
  std::lognormal_distribution<float> lognormal(0.f, 2.f);
  std::uniform_real_distribution<float> uniform(-1.f, 1.f);
  const float infinity = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < x.size(); ++i) {
    switch (kind) {
      case 1:
        x[i] = uniform(random);
        break;
      case 2:
        x[i] = 0.25f;
        break;
      case 3:
        x[i] = random() % 2 ? 1.f : 2.f;
        break;
      case 5:
        x[i] = static_cast<float>(i) * 0.5f - 100.f;
        break;
      case 6:
        x[i] = 100.f - static_cast<float>(i) * 0.5f;
        break;
      case 7:
        x[i] = static_cast<float>(random() % 64) * std::numeric_limits<float>::denorm_min();
        break;
      case 8:
        x[i] = random() % 3 == 0 ? -0.f : random() % 2 ? 0.f : uniform(random);
        break;
      case 9:
        x[i] = random() % 3 == 0 ? infinity : random() % 2 ? -infinity : uniform(random);
        break;
      case 10:
        x[i] = to_float(from_float<bf16_t>(uniform(random)));
        break;
      case 11:
        x[i] = i == x.size() / 3 ? 3e38f : 1e-30f * uniform(random);
        break;
      case 12:
        x[i] = static_cast<float>(random() % 7) - 3.f;
        break;
      case 13:
        x[i] = -lognormal(random);
        break;
      default:
        x[i] = lognormal(random);
        break;
    }
  }
  if (kind == 4)
    for (std::size_t i = 0; i + 7 <= x.size(); i += 7)
      std::fill_n(x.begin() + static_cast<std::ptrdiff_t>(i), 7,
                  *std::max_element(x.begin() + static_cast<std::ptrdiff_t>(i),
                                    x.begin() + static_cast<std::ptrdiff_t>(i) + 7));
  return x;
}

}  // namespace kvevict::emulation
