// Selection by a fixed score on the host.
#pragma once
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/cpu/topk.hpp"
#include "kvevict/select/nan_score.hpp"
#include "kvevict/select/ordered_key.hpp"
#include "kvevict/select/score_threshold.hpp"

namespace kvevict::inline KVEVICT_ABI {

constexpr std::size_t select_scratch_bytes(const ScoreThreshold&, index_t tokens) noexcept {
  return topk_scratch_bytes(tokens);
}

// The rows written to out. O(tokens). A NaN threshold or an unprotected NaN score throws std::domain_error.
inline index_t select_row(const ScoreThreshold& selector, std::span<const float> row, index_t budget,
                          const HeadProtect& protect, std::span<index_t> out, std::span<std::byte> scratch) {
  if (detail::is_nan_score(selector.threshold))
    fail_domain("ScoreThreshold: the threshold is NaN; a number or an infinity is required");
  const index_t limit = detail::check_selection("ScoreThreshold", row, budget, protect, out);
  const auto tokens = static_cast<index_t>(row.size());
  const ProtectedRows fixed = protect_within(protect, limit);
  const auto free = slice(row, fixed.sinks, tokens - fixed.count());
  index_t passing = 0;
  for (std::size_t i = 0; i < free.size(); ++i) {
    if (detail::is_nan_score(free[i])) throw NanScore(0, fixed.sinks + static_cast<index_t>(i));
    passing += free[i] >= selector.threshold;
  }
  const index_t ranked = std::min(passing, limit - fixed.count());
  std::iota(out.begin(), out.begin() + fixed.sinks, index_t{0});
  detail::topk_from<detail::Passes>(free.data(), std::ssize(free), ranked, fixed.sinks, out.data() + fixed.sinks,
                                    scratch);
  const index_t kept = fixed.count() + ranked;
  std::iota(out.begin() + fixed.sinks + ranked, out.begin() + kept, tokens - fixed.newest);
  return kept;
}

}  // namespace kvevict::inline KVEVICT_ABI
