// PyramidKV: many rows in the lower layers, few in the upper ones, the same for all heads of a layer.
// Source: PyramidKV (Cai et al., 2024). With m rows per head on average, the last layer gets lo = m / beta, the first
// hi = 2m - lo, those between lie on a line; hi is clipped at the t rows that there are, lo is then 2m - hi.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

// exact: largest remainder, the layers sum to layers * m. reference: floored steps and the window on top, as the
// published code (it keeps more than m on average). kvpress: real steps, rounded per layer, and a uniform fallback.
enum class PyramidRounding { exact, reference, kvpress };
constexpr auto words_of(PyramidRounding) noexcept {
  return std::to_array<std::string_view>({"exact", "reference", "kvpress"});
}

namespace allocate {

// Static. t is the tokens of the shortest head that holds any. Where all layers come out equal, where the shape is
// replaced or keeps more than was granted, and where a head is shorter than its share, the audit says so.
// exact=true uses up the budget: what the pyramid leaves over (m is a floor, and heads may be short) goes to the heads
// in proportion to the pyramid, by largest remainder (ties: lower layer, lower head). O(heads).
struct Pyramid {
  static constexpr std::string_view name = "pyramid";
  static constexpr index_t minimum_rows = 1;

  index_t beta = 20;  // first layer : last layer is about 2 beta - 1 : 1
  PyramidRounding rounding = PyramidRounding::exact;
  index_t window = 32;  // rows that `reference` adds on top, and below which `kvpress` falls back; not used by `exact`
  bool exact = false;   // use up the whole budget; goes with rounding=exact only

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("beta", self.beta);
    visit("rounding", self.rounding);
    visit("window", self.window);
    visit("exact", self.exact);
  }

  // out: [layers][kv_heads]; tokens: [layers * kv_heads].
  void allocate(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                Matrix<index_t> out, Audit& audit) const {
    if (beta < 1) fail_argument("pyramid: beta ", beta, "; 1 or more is required");
    if (window < 0) fail_argument("pyramid: a window of ", window, " rows; 0 or more is required");
    if (exact && rounding != PyramidRounding::exact)
      fail_argument("pyramid: rounding=", word_of(rounding), " has a sum of its own; leave exact=true out");
    index_t shortest = std::numeric_limits<index_t>::max();
    for (const index_t t : tokens)
      if (t > 0) shortest = std::min(shortest, t);
    std::vector<std::int64_t> layers(static_cast<std::size_t>(shape.layers), std::numeric_limits<index_t>::max());
    if (budget.total < budget.full) {
      const std::int64_t mean = std::max<std::int64_t>(1, budget.total / shape.heads_total());
      switch (rounding) {
        case PyramidRounding::exact:
          layers = exact_layers(shape.layers, mean, shortest);
          break;
        case PyramidRounding::reference:
          layers = reference_layers(shape.layers, mean, shortest, audit);
          break;
        case PyramidRounding::kvpress:
          if (!budget.is_ratio())
            fail_argument("pyramid: rounding=kvpress needs a budget given as a ratio (retain), not in rows or bytes");
          layers = kvpress_layers(shape.layers, 1.0 - budget.retain, shortest, audit);
      }
      if (std::equal(layers.begin() + 1, layers.end(), layers.begin()) && layers[0] < shortest)
        audit.add("pyramid: degenerated to uniform, ", layers[0], " rows in every layer");
    }
    std::int64_t kept = 0, shorter = 0;
    std::vector<std::int64_t> shares, room;  // [layers * kv_heads]
    for (index_t l = 0; l < shape.layers; ++l)
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        const std::int64_t held = tokens[static_cast<std::size_t>(shape.at(l, h))];
        const std::int64_t rows = std::min(layers[static_cast<std::size_t>(l)], held);
        shorter += rows < layers[static_cast<std::size_t>(l)];
        out.at(l, h) = static_cast<index_t>(rows);
        kept += rows;
        shares.push_back(layers[static_cast<std::size_t>(l)]);
        room.push_back(held - rows);
      }
    if (exact && kept < budget.total) {
      const std::vector<std::int64_t> more = largest_remainder(shares, budget.total - kept, room);
      for (index_t l = 0; l < shape.layers; ++l)
        for (index_t h = 0; h < shape.kv_heads; ++h)
          out.at(l, h) += static_cast<index_t>(more[static_cast<std::size_t>(shape.at(l, h))]);
      kept = budget.total;
    }
    if (budget.total < budget.full && shorter > 0)
      audit.add("pyramid: ", shorter, " heads hold fewer rows than their layer's share and keep all they have");
    if (kept > budget.total)
      audit.add("pyramid: rounding=", word_of(rounding), " keeps ", kept, " rows, ", budget.total, " were granted");
  }

 private:
  using Layers = std::vector<std::int64_t>;

  // The line as integers over the denominator beta * (layers - 1), so that rounding sees exact fractions.
  Layers exact_layers(index_t layers, std::int64_t mean, std::int64_t shortest) const {
    if (layers == 1 || mean >= shortest) return Layers(static_cast<std::size_t>(layers), mean);
    std::int64_t high = 2 * mean * beta - mean;
    if (high > shortest * beta) high = shortest * beta;
    const std::int64_t low = 2 * mean * beta - high;
    Layers weights;
    for (std::int64_t l = 0; l < layers; ++l) weights.push_back(high * (layers - 1) - l * (high - low));
    Layers rows = largest_remainder(weights, layers * mean);
    raise_to_minimum(rows, Layers(rows.size(), minimum_rows), layers * mean);
    return rows;
  }

  Layers reference_layers(index_t layers, std::int64_t capacity, std::int64_t tokens, Audit& audit) const {
    const std::int64_t past = capacity - window, most = tokens - window;
    if (past < 1)
      fail_argument("pyramid: rounding=reference keeps its window of ", window, " rows on top of at least 1, but only ",
                    capacity, " rows per head are granted; ask for more or for a smaller window");
    Layers rows(static_cast<std::size_t>(layers), std::min(capacity, tokens));
    if (capacity >= tokens) return rows;
    if (layers == 1 || tokens < 2 * past) {
      audit.add("pyramid: ", layers == 1 ? "one layer" : "the prompt is shorter than twice the rows beside the window",
                ", so the reference keeps the same in every layer");
      return rows;
    }
    std::int64_t low = past / beta, high = 2 * past - low;
    if (high >= most) {
      high = most;
      low = 2 * past - high;
    }
    const std::int64_t step = (high - low) / (layers - 1);  // high >= low here
    for (std::int64_t l = 0; l < layers; ++l) rows[static_cast<std::size_t>(l)] = high - l * step + window;
    return rows;
  }

  Layers kvpress_layers(index_t layers, double removed, std::int64_t tokens, Audit& audit) const {
    const auto t = static_cast<double>(tokens), w = static_cast<double>(window);
    const double mean = t * (1.0 - removed);
    double low = mean / beta, high = 2 * mean - low;
    if (high >= t - w) {
      high = t - w;
      low = 2 * mean - high;
    }
    Layers rows(static_cast<std::size_t>(layers), std::max<std::int64_t>(1, round_half_even(mean)));
    if (!(t >= high && high >= low && low >= w)) {
      audit.add("pyramid: rounding=kvpress fell back to uniform, as the last layer would keep ", low,
                " rows, fewer than the window of ", window, ", or the first one less than the last");
      return rows;
    }
    const double step = layers > 1 ? (high - low) / (layers - 1) : 0.0;
    for (index_t l = 0; l < layers; ++l)
      rows[static_cast<std::size_t>(l)] = std::max<std::int64_t>(1, round_half_even(high - rounded_product(l, step)));
    return rows;
  }
};

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
