// A plan for engines that must keep the same rows for all heads of a layer: the union of the heads' rows, and a mask
// that says which head attends to which of them. No memory is saved beyond what the union leaves out.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvevict/core/shape.hpp"
#include "kvevict/plan/layer_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct UnionForm {
  std::vector<index_t> rows;         // ascending: kept by at least one head
  std::vector<std::uint8_t> attend;  // [kv_heads][rows.size()]: 1 where the head keeps the row
};

// O(kept rows * log(kept rows)).
[[nodiscard]] inline UnionForm union_form(const HeadRows& keep) {
  UnionForm out;
  const auto heads = static_cast<index_t>(keep.offsets.size()) - 1;
  for (index_t h = 0; h < heads; ++h) out.rows.insert(out.rows.end(), keep.head(h).begin(), keep.head(h).end());
  std::sort(out.rows.begin(), out.rows.end());
  out.rows.erase(std::unique(out.rows.begin(), out.rows.end()), out.rows.end());
  out.attend.assign(static_cast<std::size_t>(heads) * out.rows.size(), 0);
  for (index_t h = 0; h < heads; ++h) {
    std::size_t at = static_cast<std::size_t>(h) * out.rows.size();
    auto row = out.rows.begin();
    for (const index_t kept : keep.head(h)) {
      const auto found = std::lower_bound(row, out.rows.end(), kept);
      at += static_cast<std::size_t>(found - row);
      out.attend[at] = 1;
      row = found;
    }
  }
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
