// What a selector is: it turns one head's scores and row budget into the rows that stay. A selector is data; a backend
// carries it out, found by overload: on the host
//   std::size_t select_scratch_bytes(selector, tokens)
//   index_t select_row(selector, row, budget, protect, out, scratch)
// (cpu/select_row.hpp, cpu/block_topk.hpp, cpu/score_threshold.hpp). The budget counts every row that stays.
#pragma once
#include <concepts>
#include <string_view>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

template <class S>
concept Selector = std::copyable<S> && requires {
  { S::name } -> std::convertible_to<std::string_view>;
};

// False for a selector that may keep fewer rows than it is given, which says so by a member fills_budget = false: it
// has to see the scores even where every row would fit.
template <Selector S>
constexpr bool fills_budget() {
  if constexpr (requires { S::fills_budget; }) return S::fills_budget;
  else return true;
}

// The best scored rows around the protected ones. Protected rows are left out of the ranking, whatever their score
// (scorers put -inf there), so their scores are never read; with budget >= tokens no score is read at all.
struct TopK {
  static constexpr std::string_view name = "topk";
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

}  // namespace kvevict::inline KVEVICT_ABI
