// Scorers whose score of a token depends on that token's row alone. Such a scorer derives from HeadScorer as any simple
// one, but scores one row, in a function that host and device compile: it then runs on both backends
// (cpu/score_heads.hpp, cuda/row_scorers.cuh) without another line.
//
//   struct LongValues : score::HeadScorer {
//     static constexpr std::string_view name = "long-values";
//     static constexpr Needs needs = Needs::values;
//     template <class Row>
//     KVEVICT_HOST_DEVICE float score_row(const Row& row) const {
//       float sum = 0;
//       for (index_t i = 0; i < row.value.size(); ++i) sum += row.value[i] * row.value[i];
//       return sum;
//     }
//   };
#pragma once
#include <concepts>
#include <cstdint>

#include "kvevict/config.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// The elements of a key or value row as floats. Plain data, device-safe.
template <class T>
struct RowElements {
  const T* data = nullptr;
  index_t count = 0;
  std::int64_t stride = 1;

  KVEVICT_HOST_DEVICE constexpr index_t size() const noexcept { return count; }
  KVEVICT_HOST_DEVICE constexpr float operator[](index_t i) const noexcept { return to_float(data[i * stride]); }
};

// One row of one head. What the scorer's `needs` does not name is empty, or 0.
template <class T>
struct ScoredRow {
  index_t layer = 0, head = 0;
  index_t index = 0;     // among the rows of its head
  index_t position = 0;  // in the text
  RowElements<T> key{}, value{};
};

// Larger = keep. Called for many rows at once.
template <class S>
concept ScoresRows = requires(const S& s, const ScoredRow<float>& row) {
  { s.score_row(row) } -> std::same_as<float>;
};

}  // namespace kvevict::inline KVEVICT_ABI::score
