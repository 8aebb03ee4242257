// AdamW (Loshchilov and Hutter 2019) over one flat vector of parameters, with the norm of the gradient clipped.
#pragma once
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Euclidean norm, summed in double.
template <std::floating_point T>
double norm_of(std::span<const T> x) {
  double sum = 0;
  for (const T v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

struct AdamWSettings {
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  double clip = 1;  // largest norm of a gradient; 0: no limit
};

// Moments and the step count are public so that a run can be saved and resumed.
template <std::floating_point T>
struct AdamW {
  AdamWSettings settings;
  std::int64_t steps = 0;
  std::vector<T> mean, square;  // [parameters]

  explicit AdamW(std::size_t parameters, AdamWSettings s = {})
      : settings(s), mean(parameters, T(0)), square(parameters, T(0)) {}

  // One step; returns the norm of the gradient before it was clipped. Throws std::domain_error where it is not finite.
  double step(std::span<T> parameters, std::span<const T> gradient, double rate) {
    if (parameters.size() != mean.size() || gradient.size() != mean.size())
      fail_argument("AdamW: ", parameters.size(), " parameters and ", gradient.size(), " gradients for ", mean.size(),
                    " moments");
    const double norm = norm_of(gradient);
    if (!std::isfinite(norm)) fail_domain("AdamW: step ", steps, ": the norm of the gradient is ", norm);
    const double scale = settings.clip > 0 && norm > settings.clip ? settings.clip / norm : 1;
    ++steps;
    const double rate1 = rate / (1 - std::pow(settings.beta1, static_cast<double>(steps)));
    const double bias2 = std::sqrt(1 - std::pow(settings.beta2, static_cast<double>(steps)));
    const auto b1 = static_cast<T>(settings.beta1), b2 = static_cast<T>(settings.beta2);
    const auto decay = static_cast<T>(1 - rate * settings.weight_decay);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      const T g = gradient[i] * static_cast<T>(scale);
      mean[i] = b1 * mean[i] + (1 - b1) * g;
      square[i] = b2 * square[i] + (1 - b2) * g * g;
      const T denominator = std::sqrt(square[i]) / static_cast<T>(bias2) + static_cast<T>(settings.epsilon);
      parameters[i] = parameters[i] * decay - static_cast<T>(rate1) * mean[i] / denominator;
    }
    return norm;
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
