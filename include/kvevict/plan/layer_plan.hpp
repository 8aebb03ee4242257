// What one layer keeps, as a cache carries it out: kept rows of every head, and rows that are folded into others.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// The rows one layer keeps: CSR over its heads; rows ascending and unique inside a head.
struct HeadRows {
  std::span<const std::int64_t> offsets;  // [kv_heads + 1], not necessarily from 0
  std::span<const index_t> rows;          // indexed by offsets

  // Kept rows of one head.
  std::span<const index_t> head(index_t h) const {
    const auto first = static_cast<std::size_t>(offsets[static_cast<std::size_t>(h)]);
    return rows.subspan(first, static_cast<std::size_t>(offsets[static_cast<std::size_t>(h) + 1]) - first);
  }
};

// Row `from` is folded into row `into` of the same head with this weight: numbers before compaction.
struct RowMerge {
  index_t head, from, into;
  float weight;
};

struct LayerPlan {
  HeadRows keep;
  std::span<const RowMerge> merges;  // empty for policies that only drop
};

}  // namespace kvevict::inline KVEVICT_ABI
