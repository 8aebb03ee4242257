// Selection by blocks, as engines do it whose memory is managed in blocks: rows stay or go with their neighbours. For
// comparison with TopK; what it costs in quality is what row-wise selection gains. cpu/block_topk.hpp does it.
#pragma once
#include <string_view>

#include "kvevict/core/shape.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Blocks of `block` rows, counted from row 0, are ranked by their mean score (ties: the earlier block) and kept whole
// until the budget is used up; the last one that enters gives as many of its best rows as still fit. Protected rows
// stay apart, so a block next to them may be shorter.
struct BlockTopK {
  static constexpr std::string_view name = "block";
  index_t block = 16;
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("block", self.block);
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
