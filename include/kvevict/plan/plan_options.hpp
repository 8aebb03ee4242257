// What a run asks of a plan beside the budget: which rows may be evicted at all, and which of them stay in any case.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kvevict/core/error.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Belongs to a run, not to a policy. Budgets count the rows of the range alone; what lies outside is never moved or
// cut, so a prefix that other sequences share stays whole. Both guarantees hold whatever the scorer protects.
struct PlanOptions {
  static constexpr index_t no_limit = std::numeric_limits<index_t>::max();

  index_t first = 0, last = no_limit;  // rows [first, last) of every head may be evicted
  index_t align = 1;                   // both ends of the range move inwards to multiples of it, blocks of a table
  index_t recent = 0;                  // newest rows of every head that stay in any case; inside the budget
  std::int64_t row_bytes = 0;          // bytes of a key and a value row: Budget::bytes needs it; Policy::plan sets it

  // The rows of a head of `tokens` rows that may be evicted.
  IndexRange range(index_t tokens) const noexcept {
    const std::int64_t begin = std::min<std::int64_t>((std::int64_t{first} + align - 1) / align * align, tokens);
    const std::int64_t end = std::min(last, tokens) / align * std::int64_t{align};
    return {static_cast<index_t>(begin), static_cast<index_t>(std::max(begin, end))};
  }
  bool whole() const noexcept { return first == 0 && last == no_limit && align == 1; }
};

// Throws std::invalid_argument naming the option.
inline void check_options(const PlanOptions& o) {
  if (o.first < 0 || o.last < o.first)
    fail_argument("PlanOptions: rows [", o.first, ", ", o.last, ") are no range; 0 <= first <= last is required");
  if (o.align < 1) fail_argument("PlanOptions: align ", o.align, "; at least 1 is required");
  if (o.recent < 0) fail_argument("PlanOptions: recent ", o.recent, "; 0 or more is required");
}

}  // namespace kvevict::inline KVEVICT_ABI
