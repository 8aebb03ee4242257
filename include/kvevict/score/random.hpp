// Random scores: what any policy has to beat. They follow from seed, layer, head and position alone, so they are the
// same on every platform and do not change when rows before were evicted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvevict/core/splitmix64.hpp"
#include "kvevict/score/head_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// score = (splitmix64(seed ^ splitmix64(layer << 40 ^ head << 32 ^ position)) >> 40) * 2^-24, in [0, 1).
struct Random : HeadScorer {
  static constexpr std::string_view name = "random";
  static constexpr Needs needs = Needs::positions;

  std::uint64_t seed = 0;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("seed", self.seed);
    HeadScorer::parameters(self, visit);
  }

  void score_head(const Head& head, std::span<float> out) const {
    const auto at = static_cast<std::uint64_t>(head.layer()) << 40 ^ static_cast<std::uint64_t>(head.index()) << 32;
    for (std::size_t t = 0; t < head.tokens(); ++t) {
      const std::uint64_t key = kvevict::detail::splitmix64(at ^ static_cast<std::uint32_t>(head.position(t)));
      out[t] = static_cast<float>(kvevict::detail::splitmix64(seed ^ key) >> 40) * 0x1p-24f;
    }
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
