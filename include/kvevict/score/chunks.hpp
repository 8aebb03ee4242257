// ChunkKV: neighbouring tokens stay or go together. docs/policies/chunks.md.
// Source: ChunkKV (Liu et al., 2025, arXiv 2502.00299); chunk length as in kvpress' ChunkKVPress.
#pragma once
#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/score/snapkv.hpp"
#include "kvevict/score/wrapping_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// Every token of a chunk of `size` consecutive rows gets the mean of the chunk's scores; the last chunk may be shorter.
// Rows that the base does not score (-inf) and NaN stay as they are and count in no mean. Sums in float64. O(tokens)
// per head besides the base.
template <class Base = SnapKV>
struct Chunks : WrappingScorer<Base> {
  static constexpr std::string_view name = "chunks";

  index_t size = 20;  // rows

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("size", self.size);
  }

  // Throws std::invalid_argument unless every parameter is legal.
  void check() const {
    if (size < 1) fail_argument(name, ": size=", size, "; 1 or more rows are required");
  }

  void rescore_head(const Head&, std::span<float> scores) const {
    const auto scored = [](float s) { return s > -std::numeric_limits<float>::infinity(); };  // false for NaN
    const auto length = static_cast<std::size_t>(size);
    for (std::size_t first = 0; first < scores.size(); first += length) {
      const std::span<float> chunk = scores.subspan(first, std::min(length, scores.size() - first));
      double sum = 0;
      std::size_t count = 0;
      for (const float s : chunk)
        if (scored(s)) sum += static_cast<double>(s), ++count;
      std::replace_if(chunk.begin(), chunk.end(), scored, static_cast<float>(sum / static_cast<double>(count)));
    }
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::score
