// The allocator `lkv-h`: budgets learned per head (arXiv 2605.06676; the network is in head_net.hpp).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/concepts.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/head_net.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace allocate {

// Static. Head h keeps floor(ratio_h * tokens_h) rows, in double, as the paper has it; with exact=true what the floors
// leave over goes to the largest fractions (ties: lower layer, lower head). Empty heads are part of the method. The
// sum never exceeds the budget: where heads of unequal lengths would make it larger, ratios are scaled and the audit
// says so. A budget in rows or bytes stands for the retention rows / full.
struct LkvH {
  static constexpr std::string_view name = "lkv-h";
  static constexpr index_t minimum_rows = 0;

  LkvFile file;        // a checkpoint made for this model
  bool exact = false;  // use up the whole budget

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("file", self.file);
    visit("exact", self.exact);
  }

  // out: [layers][kv_heads]; tokens: [layers * kv_heads].
  void allocate(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                Matrix<index_t> out, Audit& audit) const {
    const LkvCheckpoint& checkpoint = file.checkpoint(name);
    checkpoint.check_fits(name, shape);
    std::vector<double> scores(tokens.size()), ratios(tokens.size());
    checkpoint.head_scores(tokens, scores);
    head_ratios(scores, retention(budget), ratios);
    const std::vector<std::int64_t> rows = lkv_rows(ratios, tokens, budget, exact, audit);
    for (index_t l = 0; l < shape.layers; ++l)
      for (index_t h = 0; h < shape.kv_heads; ++h)
        out.at(l, h) = static_cast<index_t>(rows[static_cast<std::size_t>(shape.at(l, h))]);
  }

  // The retention that the ratios are made for: the asked one in millionths, as the budget counts it, or rows / full.
  static double retention(const GrantedBudget& budget) {
    if (budget.is_ratio()) return static_cast<double>(std::llround(budget.retain * 1e6)) / 1e6;
    return static_cast<double>(budget.total) / static_cast<double>(std::max<std::int64_t>(budget.full, 1));
  }

  // Ratios to rows. ratios and tokens: [heads].
  static std::vector<std::int64_t> lkv_rows(std::span<const double> ratios, std::span<const index_t> tokens,
                                            const GrantedBudget& budget, bool exact, Audit& audit) {
    std::vector<std::int64_t> rows(tokens.begin(), tokens.end());
    if (budget.total >= budget.full) return rows;
    std::vector<double> quota(tokens.size());
    for (std::size_t i = 0; i < quota.size(); ++i) {
      quota[i] = ratios[i] * static_cast<double>(tokens[i]);
      rows[i] = std::min<std::int64_t>(tokens[i], static_cast<std::int64_t>(std::floor(quota[i])));
    }
    const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    if (sum > budget.total) {
      audit.add(name, ": learned ratios give ", sum, " rows for heads of these lengths; scaled to ", budget.total);
    } else if (!exact || sum == budget.total) {
      return rows;
    } else if (budget.total - sum <= static_cast<std::int64_t>(rows.size())) {
      std::vector<std::size_t> order(rows.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      const auto fraction = [&](std::size_t i) { return quota[i] - static_cast<double>(rows[i]); };
      std::stable_sort(order.begin(), order.end(),
                       [&](std::size_t a, std::size_t b) { return fraction(a) > fraction(b); });
      std::int64_t left = budget.total - sum;
      for (const std::size_t i : order)
        if (left > 0 && rows[i] < tokens[i]) ++rows[i], --left;
      if (left == 0) return rows;
    }
    const std::vector<std::int64_t> caps(tokens.begin(), tokens.end());
    return largest_remainder(std::span<const double>(quota), budget.total, caps);
  }
};

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
