// What every host cache does with a LayerPlan before it moves a row: it checks the whole plan, so that a bad one
// changes nothing, and folds merged values into the rows that stay.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/layer_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Throws std::invalid_argument, naming layer and head, unless `keep` has one ascending, unique list of rows per head
// within tokens [kv_heads]. O(kept rows).
inline void check_keep(index_t layer, std::span<const index_t> tokens, const HeadRows& keep) {
  const auto heads = tokens.size();
  if (keep.offsets.size() != heads + 1)
    fail_argument("plan of layer ", layer, ": ", keep.offsets.size(), " offsets for ", heads, " heads; ", heads + 1,
                  " are needed");
  for (std::size_t h = 0; h < heads; ++h) {
    const std::int64_t first = keep.offsets[h], end = keep.offsets[h + 1];
    if (first < 0 || end < first || end > static_cast<std::int64_t>(keep.rows.size()))
      fail_argument("plan of layer ", layer, ", head ", h, ": offsets ", first, " to ", end, " do not ascend within ",
                    keep.rows.size(), " rows");
    std::int64_t previous = -1;
    for (const index_t row : keep.head(static_cast<index_t>(h))) {
      if (row <= previous || row >= tokens[h])
        fail_argument("plan of layer ", layer, ", head ", h, ": row ", row, " after row ", previous,
                      "; rows must ascend, be unique and lie in [0, ", tokens[h], ")");
      previous = row;
    }
  }
}

// Checks a whole plan: check_keep, and each merge folds a row that goes into a row that stays, with a finite weight
// >= 0. O(kept rows + merges * log kept).
inline void check_plan(index_t layer, std::span<const index_t> tokens, const LayerPlan& plan) {
  check_keep(layer, tokens, plan.keep);
  for (const RowMerge& m : plan.merges) {
    if (m.head < 0 || static_cast<std::size_t>(m.head) >= tokens.size())
      fail_argument("plan of layer ", layer, ": a merge names head ", m.head, " of ", tokens.size());
    const auto kept = plan.keep.head(m.head);
    const index_t t = tokens[static_cast<std::size_t>(m.head)];
    if (m.from < 0 || m.from >= t || std::binary_search(kept.begin(), kept.end(), m.from))
      fail_argument("plan of layer ", layer, ", head ", m.head, ": merge from row ", m.from, "; a row of [0, ", t,
                    ") that goes is required");
    if (!std::binary_search(kept.begin(), kept.end(), m.into))
      fail_argument("plan of layer ", layer, ", head ", m.head, ": merge into row ", m.into,
                    "; a row that stays is required");
    if (!std::isfinite(m.weight) || m.weight < 0)
      fail_argument("plan of layer ", layer, ", head ", m.head, ": merge from row ", m.from, " has weight ", m.weight,
                    "; a finite weight >= 0 is required");
  }
}

// Rows that each head keeps, [kv_heads].
[[nodiscard]] inline std::vector<index_t> kept_rows(const HeadRows& keep) {
  std::vector<index_t> out(keep.offsets.size() - 1);
  for (std::size_t h = 0; h < out.size(); ++h) out[h] = static_cast<index_t>(keep.head(static_cast<index_t>(h)).size());
  return out;
}

// Folds values of rows that go into rows that stay, as value merging does: the row `into` becomes the weighted mean
//   v_into = (v_into + sum of w_i v_from_i) / (1 + sum of w_i)
// over all merges into it, in double, rounded once to T. Keys stay as they are, since a mean of rotated keys is no key.
// `values(head)` gives the Rows<T> of a head. The plan has passed check_plan. O(merges * (log merges + head_dim_v)).
template <CacheElement T, class Values>
void merge_values(std::span<const RowMerge> merges, Values&& values) {
  if (merges.empty()) return;
  std::vector<std::size_t> order(merges.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto target_before = [&](std::size_t a, std::size_t b) {
    return merges[a].head != merges[b].head ? merges[a].head < merges[b].head : merges[a].into < merges[b].into;
  };
  std::stable_sort(order.begin(), order.end(), target_before);
  std::vector<double> sum;
  for (std::size_t i = 0; i < order.size();) {
    const RowMerge& target = merges[order[i]];
    const Rows<T> rows = values(target.head);
    const auto cols = static_cast<std::size_t>(rows.cols);
    sum.resize(cols);
    for (std::size_t c = 0; c < cols; ++c) sum[c] = to_float(rows.at(target.into, static_cast<std::int64_t>(c)));
    double weight = 1;
    for (; i < order.size() && merges[order[i]].head == target.head && merges[order[i]].into == target.into; ++i) {
      const RowMerge& m = merges[order[i]];
      weight += static_cast<double>(m.weight);
      for (std::size_t c = 0; c < cols; ++c)
        sum[c] += static_cast<double>(m.weight) *
                  static_cast<double>(to_float(rows.at(m.from, static_cast<std::int64_t>(c))));
    }
    for (std::size_t c = 0; c < cols; ++c)
      rows.at(target.into, static_cast<std::int64_t>(c)) = from_float<T>(static_cast<float>(sum[c] / weight));
  }
}

// Throws std::invalid_argument unless `keys`, `values` [kv_heads] and `positions` may be appended to a layer: equal
// numbers of rows of the right width, positions ascending from next_position on.
template <class T>
void check_append(index_t layer, const CacheShape& shape, index_t next_position, std::span<const Rows<const T>> keys,
                  std::span<const Rows<const T>> values, std::span<const index_t> positions) {
  const auto heads = static_cast<std::size_t>(shape.kv_heads);
  if (keys.size() != heads || values.size() != heads)
    fail_argument("append to layer ", layer, ": ", keys.size(), " heads of keys and ", values.size(),
                  " of values; the cache has ", heads, " KV heads");
  for (std::size_t h = 0; h < heads; ++h) {
    const auto rows = static_cast<std::int64_t>(positions.size());
    if (keys[h].rows != rows || values[h].rows != rows)
      fail_argument("append to layer ", layer, ", head ", h, ": ", keys[h].rows, " key and ", values[h].rows,
                    " value rows for ", rows, " positions");
    if (keys[h].cols != shape.head_dim_k || values[h].cols != shape.head_dim_v)
      fail_argument("append to layer ", layer, ", head ", h, ": rows of ", keys[h].cols, " and ", values[h].cols,
                    " elements; the cache holds ", shape.head_dim_k, " (keys) and ", shape.head_dim_v, " (values)");
  }
  for (const index_t p : positions) {
    if (p < next_position || p == std::numeric_limits<index_t>::max())
      fail_argument("append to layer ", layer, ": position ", p, "; positions ascend, the next is ", next_position,
                    " or later");
    next_position = p + 1;
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
