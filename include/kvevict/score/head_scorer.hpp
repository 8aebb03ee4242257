// The base of scorers that look at one head at a time. Such a scorer names its inputs and scores a head; the checks,
// the loop over heads, sinks and protection are written once (cpu/score_heads.hpp):
//
//   struct KNorm : score::HeadScorer {
//     static constexpr std::string_view name = "knorm";
//     static constexpr Needs needs = Needs::keys;
//     void score_head(const score::Head& head, std::span<float> out) const {
//       for (std::size_t t = 0; t < head.tokens(); ++t) out[t] = -score::norm(head.key(t));
//     }
//   };
#pragma once
#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/score/head.hpp"
#include "kvevict/score/row_math.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// Sinks and protection, with their parameters. A scorer with parameters of its own visits them first, then calls
// HeadScorer::parameters. Members of the base are set as in KNorm{{.sinks = 4}}, or by assignment.
struct HeadScorer {
  index_t sinks = 0;                          // first rows that are protected
  ProtectShare protect = ProtectShare::half;  // score: sinks get the layer's largest score + 1

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks);
    visit("protect", self.protect);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {sinks, 0, protect}; }
};

// A scorer whose heads do not depend on each other. out: [tokens of the head], every entry is written. Called for
// several heads at once, from different threads.
template <class S>
concept ScoresHeads = requires(const S& s, const Head& head, std::span<float> out) {
  { s.score_head(head, out) } -> std::same_as<void>;
};

}  // namespace kvevict::inline KVEVICT_ABI::score
