// Frequencies of rotary embeddings: the angle of pair i per position.
#pragma once
#include <cmath>
#include <numbers>
#include <vector>

#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Of a plain rotary embedding: theta^(-2i / rotary_dim) for i < rotary_dim / 2, computed in double and rounded once.
inline std::vector<float> rope_frequencies(double theta, index_t rotary_dim) {
  std::vector<float> out;
  for (index_t i = 0; i < rotary_dim / 2; ++i)
    out.push_back(static_cast<float>(std::pow(theta, -2.0 * i / rotary_dim)));
  return out;
}

// Llama 3's long-context scaling: slow frequencies are divided by `factor`, fast ones stay, a linear ramp between.
inline void scale_llama3(std::vector<float>& inv_freq, double factor, double low, double high, double original) {
  for (float& f : inv_freq) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength > original / low) {
      f = static_cast<float>(f / factor);
    } else if (wavelength >= original / high) {
      const double smooth = (original / wavelength - low) / (high - low);
      f = static_cast<float>((1 - smooth) * f / factor + smooth * f);
    }
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
