// Keep or skip by a fixed score, for caches that only grow: a row's fate is known when it arrives, whatever comes after
// it. The number of kept rows then follows from the scores; the budget is only an upper limit. cpu/score_threshold.hpp
// does it.
#pragma once
#include <string_view>

#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Keeps the protected rows, and of the others those that score at least `threshold`; where these are more than the
// budget holds, the best of them. May keep fewer rows than the budget.
struct ScoreThreshold {
  static constexpr std::string_view name = "threshold";
  static constexpr bool fills_budget = false;
  float threshold = 0;
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("threshold", self.threshold);
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
