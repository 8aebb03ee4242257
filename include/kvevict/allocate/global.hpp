// Global: the best rows of all layers and heads together. With `oracle` scores it is the best selection in hindsight.
#pragma once
#include <cstdint>
#include <string_view>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace allocate {

// Global allocator: each head's protected rows (at most ceil(m / 2) of the mean m, or floor(m) with protect=full) are
// set aside, every head keeps `minimum` rows of those it holds, the rest of the total goes to the best rows anywhere
// (ties: lower layer, head, index). The sum is the total. Memory O(all scores), time linear in them.
struct Global {
  static constexpr std::string_view name = "global";

  index_t minimum_rows = 0;  // 0: a head may end up empty
  Normalize normalize = Normalize::automatic;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("minimum", self.minimum_rows);
    visit("normalize", self.normalize);
  }

  ScoreSplit split_all(const SharingHeads& heads, std::int64_t total) const {
    if (minimum_rows < 0) fail_argument("global: minimum ", minimum_rows, "; 0 or more is required");
    const bool a_row_each = total >= heads.heads();
    ScoreSplit out = detail::split_with_reserve(heads, total, minimum_rows, a_row_each);
    if (out.contested() < 0)
      fail_argument("global: ", total, " rows for ", heads.heads(), " heads are fewer than the minimum of ",
                    minimum_rows, " each");
    out.softmax = normalize == Normalize::softmax || (normalize == Normalize::automatic && !heads.comparable);
    return out;
  }
};

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
