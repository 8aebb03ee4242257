// StreamingLLM as a scorer: newer rows are better, and the first rows (the attention sinks) are protected.
// Source: Efficient Streaming Language Models with Attention Sinks (Xiao et al., 2023, arXiv 2309.17453).
#pragma once
#include <cstddef>
#include <span>
#include <string_view>

#include "kvevict/score/head_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// score = index of the row. Reads no row. With protect=full a head that keeps b rows keeps `sinks` and the newest
// b - sinks, as the published method does; `half` leaves at least half of b to the newest. O(tokens) per head.
struct Position : HeadScorer {
  static constexpr std::string_view name = "position";
  static constexpr Needs needs = Needs::none;

  Position() noexcept : Position(HeadScorer{.sinks = 4}) {}
  Position(HeadScorer protection) noexcept : HeadScorer(protection) {}

  void score_head(const Head& head, std::span<float> out) const {
    for (std::size_t t = 0; t < head.tokens(); ++t) out[t] = static_cast<float>(t);
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::score
