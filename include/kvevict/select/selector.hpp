// What a selector is: it turns one head's scores and row budget into the rows that stay. TopK, the usual one, keeps
// the protected rows and fills the rest of the budget with the best scored of the others.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/topk.hpp"

namespace kvevict::inline KVEVICT_ABI {

// select writes the kept rows to out, ascending and unique, and returns how many: at most min(budget, row.size()),
// which is also the least size of out. scratch: scratch_bytes(row.size()).
template <class S>
concept Selector = std::copyable<S> && requires(const S& s, std::span<const float> row, index_t budget, Protect protect,
                                                std::span<index_t> out, std::span<std::byte> scratch) {
  { S::name } -> std::convertible_to<std::string_view>;
  { s.scratch_bytes(index_t{}) } -> std::same_as<std::size_t>;
  { s.select(row, budget, protect, out, scratch) } -> std::same_as<index_t>;
};

// False for a selector that may keep fewer rows than it is given, which says so by a member fills_budget = false: it
// has to see the scores even where every row would fit.
template <Selector S>
constexpr bool fills_budget() {
  if constexpr (requires { S::fills_budget; }) return S::fills_budget;
  else return true;
}

namespace detail {

// Rows that a selector may write; throws where the budget is negative or out too small.
inline index_t check_selection(std::string_view who, std::span<const float> row, index_t budget,
                               std::span<const index_t> out) {
  if (row.size() > static_cast<std::size_t>(std::numeric_limits<index_t>::max()))
    fail_argument(who, ": ", row.size(), " scores; at most ", std::numeric_limits<index_t>::max(), " are possible");
  if (budget < 0) fail_argument(who, ": a budget of ", budget, " rows; 0 or more are required");
  const index_t kept = std::min(budget, static_cast<index_t>(row.size()));
  if (out.size() < static_cast<std::size_t>(kept))
    fail_argument(who, ": out holds ", out.size(), " rows; ", kept, " are kept");
  return kept;
}

}  // namespace detail

// The best scored rows around the protected ones. Protected rows are left out of the ranking, whatever their score
// (scorers put -inf there), so their scores are never read; with budget >= tokens no score is read at all.
struct TopK {
  static constexpr std::string_view name = "topk";
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}

  std::size_t scratch_bytes(index_t tokens) const noexcept { return topk_scratch_bytes(tokens); }

  // Keeps min(budget, tokens) rows. O(tokens). A NaN among the unprotected scores throws NanScore with its token.
  index_t select(std::span<const float> row, index_t budget, Protect protect, std::span<index_t> out,
                 std::span<std::byte> scratch) const {
    const index_t kept = detail::check_selection("TopK", row, budget, out);
    const auto tokens = static_cast<index_t>(row.size());
    if (kept == tokens) {
      std::iota(out.begin(), out.begin() + kept, index_t{0});
      return kept;
    }
    const ProtectedRows fixed = protect_within(protect, tokens, budget);
    const index_t ranked = kept - fixed.count();
    std::iota(out.begin(), out.begin() + fixed.sinks, index_t{0});
    detail::topk_from<detail::Passes>(row.data() + fixed.sinks, tokens - fixed.count(), ranked, fixed.sinks,
                                      out.data() + fixed.sinks, scratch);
    std::iota(out.begin() + fixed.sinks + ranked, out.begin() + kept, tokens - fixed.newest);
    return kept;
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
