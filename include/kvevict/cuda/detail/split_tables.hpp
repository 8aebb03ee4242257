// How heads that share rows by score stand before a score is read, as arrays for the device.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvevict/allocate/score_split.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

struct SplitTables {
  std::vector<HeadProtect> protections;  // [rows], what was set aside
  std::vector<index_t> reserved;         // [rows], rows that stay in any case, all counted
  std::vector<IndexRange> ranges;        // [rows], entries that compete; none where every row of the group stays
  std::vector<std::uint32_t> want;       // [groups], entries that win

  // The heads of one more group. split: without shares where every row stays.
  void add(const SharingHeads& heads, const ScoreSplit& split) {
    for (std::size_t h = 0; h < heads.tokens.size(); ++h) {
      HeadProtect p = heads.protections[h];
      const index_t end = p.before + heads.tokens[h];
      if (split.shares.empty()) {
        reserved.push_back(end + p.after);
        ranges.push_back({});
      } else {
        const HeadShare share = split.shares[h];
        p.sinks = share.aside.sinks;
        p.newest = share.aside.newest;
        reserved.push_back(p.outside() + share.aside.count() + share.reserved);
        ranges.push_back({p.before + p.sinks, end - p.newest});
      }
      protections.push_back(p);
    }
    want.push_back(split.shares.empty() ? 0u : static_cast<std::uint32_t>(split.contested()));
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::cuda
