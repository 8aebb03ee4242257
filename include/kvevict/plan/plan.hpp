// EvictionPlan: which rows of every (layer, head) stay. Data that can be printed, saved, compared and replayed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvevict/core/audit.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/layer_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct EvictionPlan {
  index_t layers = 0, heads = 0;            // heads: KV heads of a layer
  std::vector<std::int64_t> offsets;        // [layers * heads + 1]
  std::vector<index_t> indices;             // rows that stay, ascending and unique inside a head
  std::vector<std::int64_t> merge_offsets;  // [layers * heads + 1], or empty without merges
  std::vector<RowMerge> merges;             // by (layer, head)

  std::string specification;  // of the policy, complete: it builds the same policy again
  std::string asked;          // the budget as asked
  GrantedBudget granted;      // what it came to
  Audit audit;                // everything that was cut or raised

  std::int64_t rows_kept() const noexcept { return static_cast<std::int64_t>(indices.size()); }

  // Kept rows of one head. Throws std::invalid_argument where the plan has no such layer or head.
  std::span<const index_t> head(index_t layer, index_t head) const& {
    check_index(layer, head);
    const auto i = static_cast<std::size_t>(layer) * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head);
    return std::span(indices).subspan(static_cast<std::size_t>(offsets[i]),
                                      static_cast<std::size_t>(offsets[i + 1] - offsets[i]));
  }

  std::span<const index_t> head(index_t, index_t) const&& = delete;

  // One layer, as a cache compacts it. Valid while the plan lives and is not changed. Throws as head() does.
  LayerPlan layer(index_t layer) const& {
    check_index(layer, 0);
    const auto h = static_cast<std::size_t>(heads), first = static_cast<std::size_t>(layer) * h;
    LayerPlan out{{std::span(offsets).subspan(first, h + 1), indices}, {}};
    if (!merge_offsets.empty())
      out.merges = std::span(merges).subspan(static_cast<std::size_t>(merge_offsets[first]),
                                             static_cast<std::size_t>(merge_offsets[first + h] - merge_offsets[first]));
    return out;
  }
  LayerPlan layer(index_t) const&& = delete;

 private:
  void check_index(index_t layer, index_t head) const {
    if (layer < 0 || layer >= layers || head < 0 || head >= heads)
      fail_argument("plan: no layer ", layer, ", head ", head, "; it is for ", layers, " layers of ", heads, " heads");
  }
};

// Equal plans keep the same rows; where they came from does not matter.
[[nodiscard]] inline bool same_rows(const EvictionPlan& a, const EvictionPlan& b) {
  return a.layers == b.layers && a.heads == b.heads && a.offsets == b.offsets && a.indices == b.indices;
}

}  // namespace kvevict::inline KVEVICT_ABI
