// Keep or skip by a fixed score, for caches that only grow: a row's fate is known when it arrives, whatever comes after
// it. The number of kept rows then follows from the scores; the budget is only an upper limit.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
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

  std::size_t scratch_bytes(index_t tokens) const noexcept { return TopK{}.scratch_bytes(tokens); }

  // The rows written to out. O(tokens). A NaN threshold or an unprotected NaN score throws std::domain_error.
  index_t select(std::span<const float> row, index_t budget, Protect protect, std::span<index_t> out,
                 std::span<std::byte> scratch) const {
    if (std::isnan(threshold)) fail_domain("ScoreThreshold: the threshold is NaN; a number or an infinity is required");
    const index_t most = detail::check_selection("ScoreThreshold", row, budget, out);
    const auto tokens = static_cast<index_t>(row.size());
    const ProtectedRows fixed = protect_within(protect, tokens, most);
    const auto free =
        row.subspan(static_cast<std::size_t>(fixed.sinks), static_cast<std::size_t>(tokens - fixed.count()));
    index_t passing = 0;
    for (std::size_t i = 0; i < free.size(); ++i) {
      if (std::isnan(free[i])) throw NanScore(0, fixed.sinks + static_cast<index_t>(i));
      passing += free[i] >= threshold;
    }
    const index_t ranked = std::min(passing, most - fixed.count());
    std::iota(out.begin(), out.begin() + fixed.sinks, index_t{0});
    detail::topk_from<detail::Passes>(free.data(), static_cast<std::int64_t>(free.size()), ranked, fixed.sinks,
                                      out.data() + fixed.sinks, scratch);
    const index_t kept = fixed.count() + ranked;
    std::iota(out.begin() + fixed.sinks + ranked, out.begin() + kept, tokens - fixed.newest);
    return kept;
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
