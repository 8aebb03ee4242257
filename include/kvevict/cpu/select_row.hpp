// Selection of one head on the host.
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
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A selector that the host carries out. select_row writes the kept rows to out, ascending and unique, and returns how
// many: at most min(budget, row.size()), which is also the least size of out. scratch: select_scratch_bytes().
template <class S>
concept HostSelector = Selector<S> &&
    requires(const S& s, std::span<const float> row, index_t budget, const HeadProtect& protect, std::span<index_t> out,
             std::span<std::byte> scratch) {
  { select_scratch_bytes(s, budget) } -> std::same_as<std::size_t>;
  { select_row(s, row, budget, protect, out, scratch) } -> std::same_as<index_t>;
};

namespace detail {

// Rows that a selector may write; throws where the budget holds less than what is guaranteed, or out is too small.
inline index_t check_selection(std::string_view who, std::span<const float> row, index_t budget,
                               const HeadProtect& protect, std::span<const index_t> out) {
  if (row.size() > static_cast<std::size_t>(std::numeric_limits<index_t>::max()))
    fail_argument(who, ": ", row.size(), " scores; at most ", std::numeric_limits<index_t>::max(), " are possible");
  if (budget < 0) fail_argument(who, ": a budget of ", budget, " rows; 0 or more are required");
  const index_t kept = std::min(budget, static_cast<index_t>(row.size()));
  if (kept < protect.outside() + protect.recent)
    fail_argument(who, ": a budget of ", budget, " rows; ", protect.outside() + protect.recent, " are guaranteed");
  if (out.size() < static_cast<std::size_t>(kept))
    fail_argument(who, ": out holds ", out.size(), " rows; ", kept, " are kept");
  return kept;
}

}  // namespace detail

constexpr std::size_t select_scratch_bytes(const TopK&, index_t tokens) noexcept { return topk_scratch_bytes(tokens); }

// Keeps min(budget, tokens) rows. O(tokens). A NaN among the unprotected scores throws NanScore with its token.
inline index_t select_row(const TopK&, std::span<const float> row, index_t budget, const HeadProtect& protect,
                          std::span<index_t> out, std::span<std::byte> scratch) {
  const index_t kept = detail::check_selection("TopK", row, budget, protect, out);
  const auto tokens = static_cast<index_t>(row.size());
  if (kept == tokens) {
    std::iota(out.begin(), out.begin() + kept, index_t{0});
    return kept;
  }
  const ProtectedRows fixed = protect_within(protect, budget);
  const index_t ranked = kept - fixed.count();
  std::iota(out.begin(), out.begin() + fixed.sinks, index_t{0});
  detail::topk_from<detail::Passes>(row.data() + fixed.sinks, tokens - fixed.count(), ranked, fixed.sinks,
                                    out.data() + fixed.sinks, scratch);
  std::iota(out.begin() + fixed.sinks + ranked, out.begin() + kept, tokens - fixed.newest);
  return kept;
}

}  // namespace kvevict::inline KVEVICT_ABI
