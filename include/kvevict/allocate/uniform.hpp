// Uniform: every head keeps the same share of its rows.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

// floor: exact integers, never above the total. kvpress: max(1, int(t * (1 - r))) in double, r = 1 - retain.
enum class UniformRounding { floor, kvpress };
constexpr auto words_of(UniformRounding) noexcept { return std::to_array<std::string_view>({"floor", "kvpress"}); }

namespace allocate {

// Static. Head h keeps floor(total * tokens[h] / full) rows, at least 1 where it holds any. Equal lengths stay equal,
// so the result fits a dense cache. rounding=kvpress is for parity: it needs a budget given as a ratio and may keep
// one row per head where the floor would be 0. O(heads).
struct Uniform {
  static constexpr std::string_view name = "uniform";
  static constexpr index_t minimum_rows = 1;

  bool exact = false;  // hand out what the floors leave over, by largest remainder (ties: lower layer, lower head)
  UniformRounding rounding = UniformRounding::floor;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("exact", self.exact);
    visit("rounding", self.rounding);
  }

  // out: [layers][kv_heads]; tokens: [layers * kv_heads].
  void allocate(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                Matrix<index_t> out, Audit&) const {
    const std::vector<std::int64_t> weights(tokens.begin(), tokens.end());
    std::vector<std::int64_t> rows;
    if (rounding == UniformRounding::kvpress) {
      if (exact) fail_argument("uniform: rounding=kvpress has no exact sum; leave exact=true out");
      if (!budget.is_ratio())
        fail_argument("uniform: rounding=kvpress needs a budget given as a ratio (retain), not in rows or bytes");
      for (const index_t t : tokens) rows.push_back(rows_as_kvpress(t, budget.retain));
    } else {
      rows = exact ? largest_remainder(weights, budget.total) : exact_floors(weights, budget.total);
      std::vector<std::int64_t> minimum;
      for (const index_t t : tokens) minimum.push_back(std::min(t, minimum_rows));
      raise_to_minimum(rows, minimum, budget.total);
    }
    for (index_t l = 0; l < shape.layers; ++l)
      for (index_t h = 0; h < shape.kv_heads; ++h)
        out.at(l, h) = static_cast<index_t>(rows[static_cast<std::size_t>(shape.at(l, h))]);
  }
};

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
