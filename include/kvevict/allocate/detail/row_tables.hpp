// What a planner knows of every head before the first score: it makes these tables, and backends work by them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kvevict/allocate/score_split.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// All [layers * kv_heads] unless said otherwise.
struct RowTables {
  CacheShape shape;
  Protect protect;                       // by the scorer, in every head
  bool comparable = false;               // scores of different heads may be compared as they are
  std::vector<index_t> tokens;           // rows before eviction
  std::vector<index_t> evictable;        // rows of the evictable range
  std::vector<HeadProtect> asked;        // what the scorer asks to protect
  std::vector<HeadProtect> protections;  // what selection protects: that, or less where an allocator set less aside
  std::vector<index_t> rows;  // rows that stay, those outside the range included; split layers: all, until then
  std::vector<std::int64_t> layer_rows;  // [layers], their sums, which the split of a layer does not change
  std::vector<ScoreSplit> splits;        // [layers]; without shares where scores do not decide

  bool is_split(index_t layer) const { return !splits[static_cast<std::size_t>(layer)].shares.empty(); }
  // Whether any row of the layer goes.
  bool evicts(index_t layer) const {
    const auto held = layer_of(tokens, shape, layer);
    return layer_rows[static_cast<std::size_t>(layer)] < std::accumulate(held.begin(), held.end(), std::int64_t{0});
  }
  index_t longest(index_t layer) const {
    index_t out = 0;
    for (const index_t t : layer_of(tokens, shape, layer)) out = detail::max(out, t);
    return out;
  }
  SharingHeads heads(index_t layer) const {
    return {layer, layer_of(evictable, shape, layer), protect, layer_of(asked, shape, layer), comparable};
  }
  SharingHeads all_heads() const { return {0, evictable, protect, asked, comparable}; }
};

}  // namespace kvevict::inline KVEVICT_ABI
