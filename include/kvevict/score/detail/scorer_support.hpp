// What the simple scorers share: the check of their call, and protect=score.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Throws std::invalid_argument unless the inputs are there and `out` is [kv_heads][most tokens of a head] or wider.
template <class T>
void check_scoring(std::string_view scorer, Needs needs, index_t sinks, const LayerObservation<T>& o,
                   const Matrix<float>& out) {
  const auto heads = static_cast<std::size_t>(o.shape.kv_heads);
  if (sinks < 0) fail_argument(scorer, ": sinks=", sinks, "; 0 or more is required");
  check_inputs(scorer, needs, 0, o);
  const auto check = [&](std::string_view what, std::size_t count) {
    if (count != heads)
      fail_argument(scorer, ": layer ", o.layer, " has ", what, " of ", count, " heads; the shape says ", heads);
  };
  check("keys", o.keys.size());  // their rows count the tokens, whether or not they are read
  if (includes_need(needs, Needs::values)) check("values", o.values.size());
  if (includes_need(needs, Needs::positions)) {
    check("positions", o.positions.size());
    for (std::size_t h = 0; h < heads; ++h)
      if (std::ssize(o.positions[h]) != o.keys[h].rows)
        fail_argument(scorer, ": layer ", o.layer, ", head ", h, " has ", o.positions[h].size(), " positions of ",
                      o.keys[h].rows, " tokens");
  }
  if (out.rows != o.shape.kv_heads || out.cols < o.most_tokens())
    fail_argument(scorer, ": scores [", out.rows, "][", out.cols, "] asked of layer ", o.layer, "; [", heads, "][",
                  o.most_tokens(), "] is required");
}

// protect=score: the sinks of every head get the layer's largest score + 1, so that the tie rule keeps them first.
template <class T>
void raise_sinks(ProtectShare protect, index_t sinks, const LayerObservation<T>& o, Matrix<float> out) {
  if (protect != ProtectShare::score || sinks == 0) return;
  float largest = -std::numeric_limits<float>::infinity();
  for (index_t h = 0; h < out.rows; ++h)
    for (index_t j = 0; j < o.tokens(h); ++j) largest = std::max(largest, out.at(h, j));
  const float raised = std::isfinite(largest) ? largest + 1.f : 1.f;  // no row had a score
  for (index_t h = 0; h < out.rows; ++h) std::fill_n(out.row(h), std::min(sinks, o.tokens(h)), raised);
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
