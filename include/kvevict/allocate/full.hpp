// Full: every head keeps everything, whatever the budget. The row of a comparison that costs nothing in quality.
#pragma once
#include <cstddef>
#include <span>
#include <string_view>

#include "kvevict/allocate/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace allocate {

// Static. Keeps more than was asked on purpose; the audit says so.
struct Full {
  static constexpr std::string_view name = "full";
  static constexpr index_t minimum_rows = 0;

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}

  void allocate(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                Matrix<index_t> out, Audit& audit) const {
    for (index_t l = 0; l < shape.layers; ++l)
      for (index_t h = 0; h < shape.kv_heads; ++h) out.at(l, h) = tokens[static_cast<std::size_t>(shape.at(l, h))];
    if (budget.total < budget.full)
      audit.add("full: all ", budget.full, " rows are kept, ", budget.total, " were granted");
  }
};

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
