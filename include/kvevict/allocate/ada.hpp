// Ada-KV: the heads of a layer share the layer's rows by how many of the layer's best scores they hold.
// Source: Ada-KV (Feng et al., 2024), and its ports in kvpress and KVCache-Factory. Deviations of the default: the
// layer total is met exactly, the floor is a floor (the published code interpolates), protected rows are set aside
// before scores are compared, and scores that heads do not share a scale for are normalised first.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/concepts.hpp"
#include "kvevict/allocate/uniform.hpp"

namespace kvevict::inline KVEVICT_ABI {

// exact: see Ada. kvpress: hard floor int(floor * N) on all columns, the window by protect=score. reference:
// interpolation between the layer's hits and a uniform share, the window on top.
enum class AdaVariant { exact, kvpress, reference };
constexpr auto words_of(AdaVariant) noexcept {
  return std::to_array<std::string_view>({"exact", "kvpress", "reference"});
}

namespace allocate {

// Layer allocator over a static one: `base` gives each layer its total, Ada splits it over the heads.
// exact, with a layer total B over H heads and m = B / H: each head's protected rows (at most ceil(m / 2), or floor(m)
// with protect=full) are set aside; its best rows up to max(1, floor(floor * m)) in all are reserved; the rest of B
// goes to the layer's best remaining rows (ties: lower head, lower index). A head gets at most its tokens; the sum is
// B. O(heads * tokens) per layer, nothing is sorted. A NaN score throws std::domain_error naming layer, head and token.
template <class Base = allocate::Uniform>
struct Ada {
  static_assert(StaticAllocator<Base>, "Ada refines a static allocator");
  static constexpr std::string_view name = "ada";
  static constexpr index_t minimum_rows = 1;

  Base base{};
  double floor = 0.2;  // share of the mean that every head keeps, in [0, 1]; a multiple of 1e-6
  AdaVariant variant = AdaVariant::exact;
  Normalize normalize = Normalize::automatic;
  bool concentration = false;  // reference only: weigh a head's scores by the share that its best b rows hold

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("floor", self.floor);
    visit("variant", self.variant);
    visit("normalize", self.normalize);
    visit("concentration", self.concentration);
  }

  // totals: [layers]. Over Uniform: the granted total by largest remainder over the layers' tokens (exact), or what
  // Uniform keeps in that variant; over another base: the sum of the base's heads.
  void layer_totals(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                    std::span<std::int64_t> totals, Audit& audit) const {
    check_parameters();
    if constexpr (std::same_as<Base, allocate::Uniform>) {
      if (variant == AdaVariant::exact && base.rounding == UniformRounding::floor)
        return split_evenly(shape, tokens, budget, totals);
      allocate::Uniform rule = base;
      if (variant == AdaVariant::kvpress) rule = {false, UniformRounding::kvpress};
      sum_heads(rule, shape, tokens, budget, totals, audit);
    } else {
      sum_heads(base, shape, tokens, budget, totals, audit);
    }
  }

  // total: this layer's, less than the heads hold.
  ScoreSplit split_layer(const SharingHeads& heads, std::int64_t total) const {
    check_parameters();
    ScoreSplit out;
    switch (variant) {
      case AdaVariant::exact: {
        const std::int64_t millionths = std::llround(floor * 1e6);
        const std::int64_t reserve = scaled_floor(total, millionths, heads.heads() * 1'000'000);
        out = detail::split_with_reserve(heads, total, std::max<std::int64_t>(1, reserve));
        break;
      }
      case AdaVariant::kvpress: {
        if (asks_otherwise(heads, ProtectShare::score))
          fail_argument("ada: variant=kvpress ranks the window with the other rows; give the scorer protect=score");
        const auto mean = static_cast<double>(total / heads.heads());
        out = detail::split_with_reserve(heads, total,
                                         std::max<std::int64_t>(1, static_cast<std::int64_t>(floor * mean)));
        break;
      }
      case AdaVariant::reference:
        if (asks_otherwise(heads, ProtectShare::full))
          fail_argument(
              "ada: variant=reference keeps the window on top of the scored rows; give the scorer protect=full");
        out = reference_split(heads, total);
    }
    if (out.contested() < 0)
      fail_argument("ada: layer ", heads.layer, ": a total of ", total, " rows is less than one per head");
    out.softmax = normalize == Normalize::softmax || (normalize == Normalize::automatic && !heads.comparable);
    return out;
  }

  bool counts_by_rule() const noexcept { return variant == AdaVariant::reference; }

  // variant=reference: per head b = C - w past rows on average, with C = total / heads and w protected rows; head h
  // gets round((1 - floor) * hits + int(floor * b)), halves to even, and its w rows on top. rows: [heads], hits and w.
  void apply_rule(const SharingHeads& heads, std::int64_t total, std::span<index_t> rows, Audit& audit) const {
    const std::int64_t mean = total / heads.heads(), window = longest_window(heads);
    const auto share = static_cast<double>(
        static_cast<std::int64_t>(floor * static_cast<double>(std::max<std::int64_t>(0, mean - window))));
    std::int64_t kept = 0;
    for (std::size_t h = 0; h < rows.size(); ++h) {
      const index_t held = heads.tokens[h], fixed = window_of(heads.protections[h], held).count();
      std::int64_t wanted = round_half_even(rounded_product(1.0 - floor, rows[h] - fixed) + share) + fixed;
      if (mean < window) wanted = mean;  // below one where heads are empty: those with rows still keep one
      wanted = std::clamp<std::int64_t>(wanted, std::min(held, 1), held);
      rows[h] = static_cast<index_t>(wanted);
      kept += wanted;
    }
    if (kept != total)
      audit.add("ada: variant=reference keeps ", kept, " rows in layer ", heads.layer, ", ", total, " were granted");
  }

 private:
  void check_parameters() const {
    if (!(floor >= 0 && floor <= 1)) fail_argument("ada: floor ", floor, "; a number in [0, 1] is required");
    if (concentration && variant != AdaVariant::reference)
      fail_argument("ada: concentration=true belongs to variant=reference");
  }

  // Rows that a layer has, and that it must keep: one per head that holds any.
  struct LayerBounds {
    std::vector<std::int64_t> held, minimum;  // [layers]
    LayerBounds(const CacheShape& shape, std::span<const index_t> tokens)
        : held(static_cast<std::size_t>(shape.layers), 0), minimum(held) {
      for (index_t l = 0; l < shape.layers; ++l)
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          const index_t t = tokens[static_cast<std::size_t>(shape.at(l, h))];
          held[static_cast<std::size_t>(l)] += t;
          minimum[static_cast<std::size_t>(l)] += std::min(t, minimum_rows);
        }
    }
  };

  static void split_evenly(const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
                           std::span<std::int64_t> totals) {
    const LayerBounds bounds(shape, tokens);
    const auto rows = largest_remainder(bounds.held, budget.total);
    std::copy(rows.begin(), rows.end(), totals.begin());
    raise_to_minimum(totals, bounds.minimum, budget.total);
  }

  template <class Rule>
  static void sum_heads(const Rule& rule, const CacheShape& shape, std::span<const index_t> tokens,
                        const GrantedBudget& budget, std::span<std::int64_t> totals, Audit& audit) {
    std::vector<index_t> rows(tokens.size());
    rule.allocate(shape, tokens, budget, {rows.data(), shape.layers, shape.kv_heads, shape.kv_heads}, audit);
    for (index_t l = 0; l < shape.layers; ++l) {
      const auto first = rows.begin() + shape.at(l, 0);
      totals[static_cast<std::size_t>(l)] = std::accumulate(first, first + shape.kv_heads, std::int64_t{0});
    }
    // A base that leaves heads empty may give a layer less than one row per head.
    const LayerBounds bounds(shape, tokens);
    bool raised = false;
    for (std::size_t l = 0; l < totals.size(); ++l) raised |= totals[l] < bounds.minimum[l];
    if (!raised) return;
    const std::int64_t sum = std::accumulate(totals.begin(), totals.end(), std::int64_t{0});
    raise_to_minimum(totals, bounds.minimum, std::max(sum, budget.total));
    audit.add("ada: layers below one row per head were raised to it");
  }

  // Whether the scorer protects rows, but in another way than the variant needs.
  static bool asks_otherwise(const SharingHeads& heads, ProtectShare needed) {
    return (heads.asked.sinks > 0 || heads.asked.window > 0) && heads.asked.share != needed;
  }

  static ProtectedRows window_of(const HeadProtect& asked, index_t tokens) { return protect_at_most(asked, tokens); }
  static std::int64_t longest_window(const SharingHeads& heads) {
    index_t out = 0;
    for (std::size_t h = 0; h < heads.tokens.size(); ++h)
      out = std::max(out, window_of(heads.protections[h], heads.tokens[h]).count());
    return out;
  }

  ScoreSplit reference_split(const SharingHeads& heads, std::int64_t total) const {
    ScoreSplit out;
    std::int64_t past = 0;
    for (std::size_t h = 0; h < heads.tokens.size(); ++h) {
      out.shares.push_back({window_of(heads.protections[h], heads.tokens[h]), 0});
      past += heads.tokens[h] - out.shares.back().aside.count();
    }
    const std::int64_t b = std::max<std::int64_t>(0, total / heads.heads() - longest_window(heads));
    out.ranked = std::min(heads.heads() * b, past);
    out.weighed_by = concentration ? static_cast<index_t>(b) : 0;
    return out;
  }
};
template <class Base>
Ada(Base) -> Ada<Base>;

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
