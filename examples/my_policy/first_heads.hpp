// An allocator: the first heads of a layer get `weight` times the rows of the others. Copy it, rename it, change what
// the weights are; largest_remainder turns any weights into whole rows with an exact sum.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/concepts.hpp"

struct FirstHeads {
  static constexpr std::string_view name = "first-heads";
  static constexpr kvevict::index_t minimum_rows = 1;  // no head is ever empty

  kvevict::index_t heads = 1;
  double weight = 2;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("heads", self.heads);
    visit("weight", self.weight);
  }

  // tokens: [layers * kv_heads]; out: [layers][kv_heads].
  void allocate(const kvevict::CacheShape& shape, std::span<const kvevict::index_t> tokens,
                const kvevict::GrantedBudget& budget, kvevict::Matrix<kvevict::index_t> out, kvevict::Audit&) const {
    std::vector<double> weights;
    for (kvevict::index_t l = 0; l < shape.layers; ++l)
      for (kvevict::index_t h = 0; h < shape.kv_heads; ++h) weights.push_back(h < heads ? weight : 1.0);
    const std::vector<std::int64_t> most(tokens.begin(), tokens.end());
    auto rows = kvevict::largest_remainder(weights, budget.total, most);
    std::vector<std::int64_t> least;
    for (const kvevict::index_t t : tokens) least.push_back(std::min(t, minimum_rows));
    kvevict::raise_to_minimum(rows, least, budget.total);
    for (kvevict::index_t l = 0; l < shape.layers; ++l)
      for (kvevict::index_t h = 0; h < shape.kv_heads; ++h)
        out.at(l, h) = static_cast<kvevict::index_t>(rows[static_cast<std::size_t>(shape.at(l, h))]);
  }
};
