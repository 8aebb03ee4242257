// Heads that share rows by score, with the arrays behind them, for tests of allocators without a planner.
#pragma once
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/allocate/concepts.hpp"
#include "kvevict/allocate/score_split.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/split_rows.hpp"

namespace kvevict::tests {

struct Sharing {
  index_t layer = 0;
  std::vector<index_t> tokens;
  Protect asked;
  bool comparable = true;
  std::vector<HeadProtect> protections;

  Sharing(index_t of_layer, std::vector<index_t> counts, Protect protect, bool compare = true)
      : layer(of_layer), tokens(std::move(counts)), asked(protect), comparable(compare) {
    for (const index_t t : tokens) protections.push_back(protect_asked(protect, t));
  }
  SharingHeads heads() const { return {layer, tokens, asked, protections, comparable}; }
  std::int64_t held() const { return std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}); }

  // What a layer's planner does: rows of each head for `total` rows.
  template <LayerAllocator A>
  std::vector<index_t> rows(const A& allocator, Matrix<const float> scores, std::int64_t total, Audit& audit,
                            int threads = 1) const {
    if (total >= held()) return tokens;
    std::vector<index_t> out(tokens.size(), -1);
    split_rows(host_exec{threads}, scores, heads(), allocator.split_layer(heads(), total), out);
    if (counts_by_rule(allocator)) allocator.apply_rule(heads(), total, out, audit);
    return out;
  }
  // What the selector protects in a head where `total` rows are shared.
  template <LayerAllocator A>
  HeadProtect protection(const A& allocator, std::int64_t total, std::size_t head) const {
    HeadProtect out = protections[head];
    if (total >= held()) return out;
    const ProtectedRows aside = allocator.split_layer(heads(), total).shares[head].aside;
    out.sinks = aside.sinks;
    out.newest = aside.newest;
    return out;
  }
};

}  // namespace kvevict::tests
