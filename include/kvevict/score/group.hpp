// From the scores of query heads to the scores of the KV head that they share (grouped-query attention).
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "kvevict/config.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/rows.hpp"

namespace kvevict::inline KVEVICT_ABI {

// none: no reduction, a row of scores for each query head.
enum class GroupReduction { none, mean, max, sum };
constexpr auto words_of(GroupReduction) noexcept {
  return std::to_array<std::string_view>({"none", "mean", "max", "sum"});
}

// A sum over the query heads up to a factor, so that it may be taken while scores are still being added up.
KVEVICT_HOST_DEVICE constexpr bool is_linear(GroupReduction g) noexcept {
  return g == GroupReduction::mean || g == GroupReduction::sum;
}

// rows: [group][tokens], one row per query head of one KV head, at least one; the result replaces row 0 (`none` leaves
// all rows as they are). Query heads are taken in ascending order.
inline void reduce_group(GroupReduction g, Matrix<float> rows) {
  if (g == GroupReduction::none) return;
  const auto tokens = static_cast<std::size_t>(rows.cols);
  float* const out = rows.row(0);
  for (index_t q = 1; q < rows.rows; ++q) {
    const float* const in = rows.row(q);
    if (g == GroupReduction::max)
      for (std::size_t j = 0; j < tokens; ++j) out[j] = out[j] < in[j] ? in[j] : out[j];
    else
      for (std::size_t j = 0; j < tokens; ++j) out[j] += in[j];
  }
  if (g == GroupReduction::mean)
    for (std::size_t j = 0; j < tokens; ++j) out[j] /= static_cast<float>(rows.rows);
}

}  // namespace kvevict::inline KVEVICT_ABI
