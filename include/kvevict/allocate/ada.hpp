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
#include "kvevict/allocate/flat.hpp"
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

  // out: [kv_heads]; total: this layer's.
  void allocate_layer(const host_exec& exec, const LayerScores& layer, std::int64_t total, std::span<index_t> out,
                      Audit& audit) const {
    check_parameters();
    const std::int64_t held = std::accumulate(layer.tokens.begin(), layer.tokens.end(), std::int64_t{0});
    if (total >= held) {
      std::copy(layer.tokens.begin(), layer.tokens.end(), out.begin());
      return;
    }
    std::vector<float> normalised;
    Matrix<const float> scores = layer.scores;
    if (normalize == Normalize::softmax || (normalize == Normalize::automatic && !layer.comparable)) {
      normalised.resize(static_cast<std::size_t>(scores.rows) * static_cast<std::size_t>(scores.cols));
      const Matrix<float> to{normalised.data(), scores.rows, scores.cols, scores.cols};
      detail::log_softmax(exec, scores, layer.tokens, to);
      scores = to;
    }
    try {
      switch (variant) {
        case AdaVariant::exact:
          return exact_split(exec, scores, layer, total, out);
        case AdaVariant::kvpress:
          return kvpress_split(exec, scores, layer, total, out);
        default:
          return reference_split(exec, scores, layer, total, out, audit);
      }
    } catch (const NanScore& nan) {
      fail_domain("ada: the score of layer ", layer.layer, ", head ", nan.row, ", token ", nan.token, " is NaN");
    }
  }

  // What the selector has to protect in a head: no more than was set aside, so that a head which won many rows keeps
  // them by score.
  Protect head_protection(const LayerScores& layer, std::int64_t total, index_t head) const {
    Protect out = layer.protect;
    if (variant != AdaVariant::exact) return out;
    const auto rows = detail::set_aside(out, layer.tokens[static_cast<std::size_t>(head)], total, heads_of(layer));
    out.sinks = rows.sinks;
    out.window = rows.newest;
    return out;
  }

 private:
  static std::int64_t heads_of(const LayerScores& layer) { return std::ssize(layer.tokens); }

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

  void exact_split(const host_exec& exec, Matrix<const float> scores, const LayerScores& layer, std::int64_t total,
                   std::span<index_t> out) const {
    const std::int64_t heads = heads_of(layer), millionths = std::llround(floor * 1e6);
    const auto reserve = std::max<std::int64_t>(1, scaled_floor(total, millionths, heads * 1'000'000));
    split(exec, scores, layer, total, reserve, out);
  }

  void kvpress_split(const host_exec& exec, Matrix<const float> scores, const LayerScores& layer, std::int64_t total,
                     std::span<index_t> out) const {
    if (asks_protection(layer) && layer.protect.share != ProtectShare::score)
      fail_argument("ada: variant=kvpress ranks the window with the other rows; give the scorer protect=score");
    const auto mean = static_cast<double>(total / heads_of(layer));
    split(exec, scores, layer, total, std::max<std::int64_t>(1, static_cast<std::int64_t>(floor * mean)), out);
  }

  static bool asks_protection(const LayerScores& layer) { return layer.protect.sinks > 0 || layer.protect.window > 0; }

  // reserve: rows that every head keeps where it holds as many, set-aside rows included.
  static void split(const host_exec& exec, Matrix<const float> scores, const LayerScores& layer, std::int64_t total,
                    std::int64_t reserve, std::span<index_t> out) {
    const std::size_t heads = layer.tokens.size();
    std::vector<index_t> aside(heads), least(heads);
    std::vector<IndexRange> candidates(heads);
    std::int64_t left = total;
    for (std::size_t h = 0; h < heads; ++h) {
      const index_t tokens = layer.tokens[h];
      const auto rows = detail::set_aside(layer.protect, tokens, total, std::ssize(layer.tokens));
      aside[h] = rows.count();
      least[h] = static_cast<index_t>(std::max<std::int64_t>(0, std::min<std::int64_t>(reserve, tokens) - aside[h]));
      candidates[h] = {rows.sinks, tokens - rows.newest};
      left -= aside[h];
    }
    if (const auto floors = std::accumulate(least.begin(), least.end(), std::int64_t{0}); floors > left)
      fail_argument("ada: layer ", layer.layer, ": a total of ", total, " rows is less than one per head");
    detail::split_flat(exec, scores, candidates, least, left, out);
    for (std::size_t h = 0; h < heads; ++h) out[h] += aside[h];
  }

  // Per head b = C - w past rows on average, with C = total / heads and w protected rows; head h gets
  // round((1 - floor) * hits + int(floor * b)), halves to even, and its w rows on top.
  void reference_split(const host_exec& exec, Matrix<const float> scores, const LayerScores& layer, std::int64_t total,
                       std::span<index_t> out, Audit& audit) const {
    if (asks_protection(layer) && layer.protect.share != ProtectShare::full)
      fail_argument("ada: variant=reference keeps the window on top of the scored rows; give the scorer protect=full");
    const std::size_t heads = layer.tokens.size();
    std::vector<ProtectedRows> fixed(heads);
    std::vector<IndexRange> candidates(heads);
    index_t window = 0;
    std::int64_t past = 0;
    for (std::size_t h = 0; h < heads; ++h) {
      fixed[h] = protect_asked(layer.protect, layer.tokens[h]);
      candidates[h] = {fixed[h].sinks, layer.tokens[h] - fixed[h].newest};
      window = std::max(window, fixed[h].count());
      past += candidates[h].size();
    }
    const std::int64_t mean = total / heads_of(layer), b = std::max<std::int64_t>(0, mean - window);
    std::vector<float> weighted;
    if (concentration) {
      weighted = weigh(exec, scores, candidates, b);
      scores = {weighted.data(), scores.rows, scores.cols, scores.cols};
    }
    const std::vector<index_t> no_floor(heads, 0);
    detail::split_flat(exec, scores, candidates, no_floor, std::min(heads_of(layer) * b, past), out);
    const auto share = static_cast<double>(static_cast<std::int64_t>(floor * static_cast<double>(b)));
    std::int64_t kept = 0;
    for (std::size_t h = 0; h < heads; ++h) {
      const std::int64_t rows = round_half_even(rounded_product(1.0 - floor, out[h]) + share) + fixed[h].count();
      out[h] = static_cast<index_t>(std::clamp<std::int64_t>(rows, std::min(layer.tokens[h], 1), layer.tokens[h]));
      if (mean < window) out[h] = static_cast<index_t>(std::min<std::int64_t>(mean, layer.tokens[h]));
      kept += out[h];
    }
    if (kept != total)
      audit.add("ada: variant=reference keeps ", kept, " rows in layer ", layer.layer, ", ", total, " were granted");
  }

  // Scores times (sum of the head's best b) / (sum of all its candidates), by row.
  static std::vector<float> weigh(const host_exec& exec, Matrix<const float> scores,
                                  std::span<const IndexRange> candidates, std::int64_t b) {
    std::vector<float> out(static_cast<std::size_t>(scores.rows) * static_cast<std::size_t>(scores.cols));
    parallel_for(exec, scores.rows, topk_scratch_bytes(scores.cols), [&](std::int64_t r, std::span<std::byte> scratch) {
      const IndexRange range = candidates[static_cast<std::size_t>(r)];
      if (range.empty()) return;
      const std::span row(scores.row(static_cast<index_t>(r)) + range.begin, static_cast<std::size_t>(range.size()));
      std::vector<index_t> best(static_cast<std::size_t>(std::min<std::int64_t>(b, range.size())));
      try {
        topk(row, static_cast<index_t>(best.size()), best, scratch);
      } catch (const NanScore& nan) {
        throw NanScore(static_cast<index_t>(r), range.begin + nan.token);
      }
      double top = 0, all = 0;
      for (const index_t i : best) top += static_cast<double>(row[static_cast<std::size_t>(i)]);
      for (const float s : row) all += static_cast<double>(s);
      const double factor = all == 0 ? 1.0 : top / all;
      float* to = out.data() + r * scores.cols + range.begin;
      for (std::size_t i = 0; i < row.size(); ++i) to[i] = static_cast<float>(factor * static_cast<double>(row[i]));
    });
    return out;
  }
};
template <class Base>
Ada(Base) -> Ada<Base>;

}  // namespace allocate

}  // namespace kvevict::inline KVEVICT_ABI
