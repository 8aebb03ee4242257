// The checks of a call of score_on(), written once for every scorer and backend.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// Window queries and the log-sum-exp of their rows, against the shape and the recorded positions.
template <class T>
void check_window(std::string_view scorer, const LayerObservation<T>& o) {
  const CacheShape& s = o.shape;
  const std::size_t recorded = o.window_positions.size();
  if (o.window_queries.size() != static_cast<std::size_t>(s.q_heads))
    fail_argument(scorer, ": layer ", o.layer, " has window queries of ", o.window_queries.size(),
                  " query heads; the shape says ", s.q_heads);
  for (const auto& q : o.window_queries)
    if (q.cols != s.head_dim_k || q.rows < static_cast<std::int64_t>(recorded))
      fail_argument(scorer, ": layer ", o.layer, " has window queries [", q.rows, "][", q.cols, "]; [", recorded, "][",
                    s.head_dim_k, "] is required");
  if (!o.extras.lse.empty() && o.extras.lse.size() != static_cast<std::size_t>(s.q_heads) * recorded)
    fail_argument(scorer, ": layer ", o.layer, " has ", o.extras.lse.size(), " log-sum-exp values; ", s.q_heads,
                  " query heads * ", recorded, " window rows are required");
}

template <class T>
void check_future(std::string_view scorer, const LayerObservation<T>& o) {
  const auto& queries = o.extras.future_queries;
  if (queries.size() != static_cast<std::size_t>(o.shape.q_heads))
    fail_argument(scorer, ": layer ", o.layer, " has continuation queries of ", queries.size(),
                  " query heads; the shape says ", o.shape.q_heads);
  for (const auto& q : queries)
    if (q.cols != o.shape.head_dim_k)
      fail_argument(scorer, ": layer ", o.layer, " has continuation queries of ", q.cols, " elements; the shape says ",
                    o.shape.head_dim_k);
}

}  // namespace detail

// Throws std::invalid_argument naming the scorer and what would be right, unless its parameters are legal, the
// observation holds what it needs in the sizes that its shape states, and `out` is [score heads][most tokens of a head]
// or wider. Reads no row and no position, so it holds for observations of a device as well. O(heads).
template <class S, class T>
void check_scoring(const S& scorer, const LayerObservation<T>& o, const Matrix<float>& out) {
  constexpr std::string_view name = S::name;
  const auto heads = static_cast<std::size_t>(o.shape.kv_heads);
  if constexpr (requires { scorer.check(); }) scorer.check();
  if (const index_t sinks = scorer.protection().sinks; sinks < 0)
    fail_argument(name, ": sinks=", sinks, "; 0 or more is required");
  const Needs needs = needs_of(scorer);
  check_inputs(name, needs, scorer.window_rows(), o);
  const auto check_heads = [&](std::string_view what, std::size_t count) {
    if (count != heads)
      fail_argument(name, ": layer ", o.layer, " has ", what, " of ", count, " heads; the shape says ", heads);
  };
  const auto check_rows = [&](std::string_view what, std::span<const Rows<const T>> rows, index_t dim) {
    check_heads(what, rows.size());
    for (std::size_t h = 0; h < heads; ++h)
      if (rows[h].cols != dim || rows[h].rows != o.keys[h].rows)
        fail_argument(name, ": layer ", o.layer, ", head ", h, " has ", what, " [", rows[h].rows, "][", rows[h].cols,
                      "]; [", o.keys[h].rows, "][", dim, "] is required");
  };
  check_rows("keys", o.keys, o.shape.head_dim_k);  // their rows count the tokens, whether or not they are read
  if (includes_need(needs, Needs::values)) check_rows("values", o.values, o.shape.head_dim_v);
  if (includes_need(needs, Needs::positions) || !o.positions.empty()) {
    check_heads("positions", o.positions.size());
    for (std::size_t h = 0; h < heads; ++h)
      if (static_cast<std::int64_t>(o.positions[h].size()) != o.keys[h].rows)
        fail_argument(name, ": layer ", o.layer, ", head ", h, " has ", o.positions[h].size(), " positions of ",
                      o.keys[h].rows, " tokens");
  }
  if (includes_need(needs, Needs::window_queries)) detail::check_window(name, o);
  if (includes_need(needs, Needs::future_queries)) detail::check_future(name, o);
  const index_t rows = score_heads(scorer, o.shape);
  if (out.rows != rows || out.cols < o.most_tokens())
    fail_argument(name, ": scores [", out.rows, "][", out.cols, "] asked of layer ", o.layer, "; [", rows, "][",
                  o.most_tokens(), "] is required");
}

// Throws std::invalid_argument naming the first entry that is wrong, unless the positions of each head, and those of
// the window's queries, ascend. For observations in host memory. O(heads * tokens).
template <class T>
void check_positions(std::string_view scorer, const LayerObservation<T>& o) {
  const auto check = [&](std::span<const index_t> positions, const auto&... where) {
    for (std::size_t i = 1; i < positions.size(); ++i)
      if (positions[i] <= positions[i - 1])
        fail_argument(scorer, ": layer ", o.layer, where..., '[', i, "] is ", positions[i], " after ", positions[i - 1],
                      "; positions must ascend");
  };
  for (std::size_t h = 0; h < o.positions.size(); ++h) check(o.positions[h], ", head ", h, ": positions");
  check(o.window_positions, ": window_positions");
}

}  // namespace kvevict::inline KVEVICT_ABI
