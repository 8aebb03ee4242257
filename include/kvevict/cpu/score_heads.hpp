// Scorers that look at one head at a time, on the host: checked once, heads in parallel, sinks raised.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/check_scoring.hpp"
#include "kvevict/score/head_scorer.hpp"
#include "kvevict/score/row_scorer.hpp"
#include "kvevict/score/wrapping_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// protect=score: the sinks of every head get the layer's largest score + 1, so that the tie rule keeps them first.
template <class T>
void raise_sinks(Protect protect, const LayerObservation<T>& o, Matrix<float> out) {
  if (protect.share != ProtectShare::score || protect.sinks == 0) return;
  float largest = -std::numeric_limits<float>::infinity();
  for (index_t h = 0; h < out.rows; ++h)
    for (index_t j = 0; j < o.tokens(h); ++j) largest = std::max(largest, out.at(h, j));
  const float raised = std::isfinite(largest) ? largest + 1.f : 1.f;  // no row had a score
  for (index_t h = 0; h < out.rows; ++h) std::fill_n(out.row(h), std::min(protect.sinks, o.tokens(h)), raised);
}

// f(head, scores) for each row of scores with the head that it belongs to, in parallel.
template <class T, class F>
void for_scored_heads(const host_exec& exec, const LayerObservation<T>& o, Matrix<float> out, F&& f) {
  if (out.rows == 0) return;
  const index_t rows_per_head = out.rows / o.shape.kv_heads;
  parallel_for(exec, out.rows, score::Head::buffer_floats(o.shape) * sizeof(float),
               [&](std::int64_t r, std::span<std::byte> scratch) {
                 const auto row = static_cast<index_t>(r);
                 const score::Head head(o, row / rows_per_head, reinterpret_cast<float*>(scratch.data()));
                 f(head, std::span<float>(out.row(row), head.tokens()));
               });
}

}  // namespace detail

// out: [kv_heads][most tokens of a head], as score/concepts.hpp describes it. Throws std::invalid_argument for inputs
// that are missing or do not fit.
template <score::ScoresHeads S, CacheElement T>
void score_on(const host_exec& exec, const S& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  check_scoring(scorer, o, out);
  detail::for_scored_heads(exec, o, out,
                           [&](const score::Head& head, std::span<float> scores) { scorer.score_head(head, scores); });
  detail::raise_sinks(scorer.protection(), o, out);
}

// A scorer that scores one row at a time. out: [kv_heads][most tokens of a head].
template <score::ScoresRows S, CacheElement T>
void score_on(const host_exec& exec, const S& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  check_scoring(scorer, o, out);
  constexpr Needs needs = S::needs;  // known to the compiler, so that its loop has no branches
  const auto elements = [](std::span<const float> row) {
    return score::RowElements<float>{row.data(), static_cast<index_t>(row.size())};
  };
  detail::for_scored_heads(exec, o, out, [&](const score::Head& head, std::span<float> scores) {
    for (std::size_t t = 0; t < scores.size(); ++t) {
      score::ScoredRow<float> row{.layer = head.layer(), .head = head.index(), .index = static_cast<index_t>(t)};
      if constexpr (includes_need(needs, Needs::positions)) row.position = head.position(t);
      if constexpr (includes_need(needs, Needs::keys)) row.key = elements(head.key(t));
      if constexpr (includes_need(needs, Needs::values)) row.value = elements(head.value(t));
      scores[t] = scorer.score_row(row);
    }
  });
  detail::raise_sinks(scorer.protection(), o, out);
}

// A scorer that changes the scores of what it wraps, head by head. out: as its base has it.
template <score::RescoresHeads S, CacheElement T>
void score_on(const host_exec& exec, const S& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  check_scoring(scorer, o, out);
  score_on(exec, scorer.base, o, out);
  detail::for_scored_heads(
      exec, o, out, [&](const score::Head& head, std::span<float> scores) { scorer.rescore_head(head, scores); });
}

}  // namespace kvevict::inline KVEVICT_ABI
