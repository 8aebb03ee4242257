// How many rows may stay. A budget counts every row that stays, protected ones included, and is a total over all
// layers and heads once resolved. All arithmetic is in 64-bit integers.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "kvevict/core/arithmetic.hpp"
#include "kvevict/core/audit.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A budget that has met a cache.
struct GrantedBudget {
  std::int64_t total = 0;  // rows over all layers and heads; never above `full`
  std::int64_t full = 0;   // rows before eviction
  double retain = 0;       // as asked; 0 unless asked as a ratio

  bool is_ratio() const noexcept { return retain > 0; }
};

// Bytes of one key and one value row of elements T.
template <CacheElement T>
constexpr std::int64_t bytes_per_row(const CacheShape& shape) noexcept {
  return (std::int64_t{shape.head_dim_k} + shape.head_dim_v) * std::int64_t{sizeof(T)};
}

class Budget {
 public:
  enum class Unit { rows, retain, bytes };

  // `mean` rows per (layer, head).
  static Budget rows(std::int64_t mean) { return {Unit::rows, mean, 0}; }

  // kept / full, finite and in (0, 1]; taken as the nearest multiple of 1e-6, so that 0.29 of 100 rows is 29.
  static Budget retain(double ratio) {
    // The bits, since a compiler may be told that there is no NaN. Those of (0, 1] ascend with the value.
    const auto bits = std::bit_cast<std::uint64_t>(ratio);
    if (bits == 0 || bits > std::bit_cast<std::uint64_t>(1.0))
      fail_argument("Budget::retain: ", ratio, " is not a ratio; a finite number in (0, 1] is required");
    return {Unit::retain, std::max<std::int64_t>(1, std::llround(ratio * parts)), ratio};
  }

  // Bytes of keys and values that may stay, rows * (key bytes + value bytes). What a row takes is said where the budget
  // meets a cache: Policy::plan knows it, make_planner is told (PlanOptions::row_bytes).
  static Budget bytes(std::int64_t bytes) { return {Unit::bytes, bytes, 0}; }

  Unit unit() const noexcept { return unit_; }
  // As it was asked: "retain 0.15", "64 rows per head", "1048576 bytes".
  std::string description() const {
    switch (unit_) {
      case Unit::rows:
        return joined_text(amount_, " rows per head");
      case Unit::retain:
        return joined_text("retain ", ratio_);
      default:
        return joined_text(amount_, " bytes");
    }
  }

  // The total for heads that hold `tokens` rows each, [layers * kv_heads], of row_bytes bytes (key and value).
  // minimum: rows per non-empty head that must stay (0 where empty heads are part of the method). A ratio below it is
  // raised and the audit says so; rows or bytes below it throw std::invalid_argument naming the minimum.
  GrantedBudget resolve(std::span<const index_t> tokens, std::int64_t row_bytes, index_t minimum, Audit& audit) const {
    const std::int64_t full = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
    const auto heads = static_cast<std::int64_t>(tokens.size());
    std::int64_t lowest = 0;
    for (const index_t t : tokens) lowest += std::min(t, minimum);
    GrantedBudget out;
    out.full = full;
    switch (unit_) {
      case Unit::retain:
        out.total = scaled_floor(full, amount_, parts);
        out.retain = ratio_;
        if (out.total < lowest) {
          audit.add("budget raised from ", out.total, " to ", lowest, " rows: at least ", minimum, " per head");
          out.total = lowest;
        }
        return out;
      case Unit::rows:
        if (amount_ < minimum) fail_argument("Budget::rows: ", amount_, " per head; the minimum is ", minimum);
        out.total =
            amount_ > full / std::max<std::int64_t>(heads, 1) ? std::min(full, amount_ * heads) : amount_ * heads;
        return out;
      default:
        out.total = std::min(full, amount_ / row_bytes);
        if (amount_ < 0 || out.total < lowest)
          fail_argument("Budget::bytes: ", amount_, " bytes hold ", amount_ / row_bytes, " rows of ", row_bytes,
                        " bytes; the minimum is ", lowest * row_bytes, " bytes (", minimum, " row per head)");
        return out;
    }
  }

 private:
  static constexpr std::int64_t parts = 1'000'000;
  Budget(Unit unit, std::int64_t amount, double ratio) : unit_(unit), amount_(amount), ratio_(ratio) {
    if (unit == Unit::rows && (amount < 0 || amount > std::numeric_limits<index_t>::max()))
      fail_argument("Budget::rows: ", amount, " per head; 0 to ", std::numeric_limits<index_t>::max(), " is legal");
  }

  Unit unit_;
  std::int64_t amount_;  // rows per head, millionths, or bytes
  double ratio_;
};

}  // namespace kvevict::inline KVEVICT_ABI
