// Global: the best rows of all layers and heads together. With `oracle` scores it is the best selection in hindsight.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/allocate/flat.hpp"

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

  // layers: [layers]; out: [layers][kv_heads]. A NaN score throws std::domain_error naming layer, head and token.
  void allocate_all(const host_exec& exec, std::span<const LayerScores> layers, const GrantedBudget& budget,
                    Matrix<index_t> out, Audit&) const {
    if (minimum_rows < 0) fail_argument("global: minimum ", minimum_rows, "; 0 or more is required");
    index_t heads = 0, width = 0;
    for (const LayerScores& l : layers) {
      heads += l.scores.rows;
      width = std::max(width, l.scores.cols);
    }
    // One list of heads over all layers: [heads][width].
    std::vector<float> all(static_cast<std::size_t>(heads) * static_cast<std::size_t>(width));
    std::vector<index_t> aside, least, counts(static_cast<std::size_t>(heads));
    std::vector<IndexRange> candidates;
    std::int64_t left = budget.total;
    index_t first = 0;
    for (const LayerScores& l : layers) {
      const Matrix<float> to{all.data() + std::int64_t{first} * width, l.scores.rows, width, width};
      if (normalize == Normalize::softmax || (normalize == Normalize::automatic && !l.comparable))
        detail::log_softmax(exec, l.scores, l.tokens, to);
      else
        for (index_t h = 0; h < l.scores.rows; ++h)
          std::copy_n(l.scores.row(h), l.tokens[static_cast<std::size_t>(h)], to.row(h));
      const Protect protect = budget.total < heads ? Protect{} : l.protect;  // not even a row for each head
      for (const index_t tokens : l.tokens) {
        const auto rows = detail::set_aside(protect, tokens, budget.total, heads);
        aside.push_back(rows.count());
        least.push_back(std::max(0, std::min(tokens, minimum_rows) - rows.count()));
        candidates.push_back({rows.sinks, tokens - rows.newest});
        left -= rows.count();
      }
      first += l.scores.rows;
    }
    if (std::accumulate(least.begin(), least.end(), std::int64_t{0}) > left)
      fail_argument("global: ", budget.total, " rows for ", heads, " heads are fewer than the minimum of ",
                    minimum_rows, " each");
    const Matrix<const float> scores{all.data(), heads, width, width};
    try {
      detail::split_flat(exec, scores, candidates, least, left, counts);
    } catch (const NanScore& nan) {
      index_t layer = 0, head = nan.row;
      for (; head >= layers[static_cast<std::size_t>(layer)].scores.rows; ++layer)
        head -= layers[static_cast<std::size_t>(layer)].scores.rows;
      fail_domain("global: the score of layer ", layers[static_cast<std::size_t>(layer)].layer, ", head ", head,
                  ", token ", nan.token, " is NaN");
    }
    std::size_t at = 0;
    for (index_t l = 0; l < out.rows; ++l)
      for (index_t h = 0; h < out.cols; ++h, ++at) out.at(l, h) = counts[at] + aside[at];
  }
};

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
