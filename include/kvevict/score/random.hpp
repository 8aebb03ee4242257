// Random scores: the baseline that any policy has to beat. They follow from seed, layer, head and position alone, so
// they are the same on every platform and do not change when rows before were evicted.
#pragma once
#include <cstdint>
#include <string_view>

#include "kvevict/config.hpp"
#include "kvevict/core/splitmix64.hpp"
#include "kvevict/score/head_scorer.hpp"
#include "kvevict/score/row_scorer.hpp"

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

  template <class Row>
  KVEVICT_HOST_DEVICE float score_row(const Row& row) const {
    const auto at = static_cast<std::uint64_t>(row.layer) << 40 ^ static_cast<std::uint64_t>(row.head) << 32;
    const std::uint64_t key = kvevict::detail::splitmix64(at ^ static_cast<std::uint32_t>(row.position));
    return static_cast<float>(kvevict::detail::splitmix64(seed ^ key) >> 40) * 0x1p-24f;
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
