// What attention over a cache is asked, and what it answers: shared by the plain reference and the fast exact form.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/check_plan.hpp"
#include "kvevict/plan/layer_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Queries of one layer, post-RoPE.
template <CacheElement Q>
struct AttentionQueries {
  std::span<const Rows<const Q>> rows;  // [q_heads] of [queries][head_dim_k]
  std::span<const index_t> positions;   // [queries], any order
};

// Rows that follow the cache without being in it, such as the continuation of a dump. Empty by default.
template <CacheElement T>
struct LocalRows {
  std::span<const Rows<const T>> keys, values;  // [kv_heads] of [local][dim]
  std::span<const index_t> positions;           // [local], any order
};

template <CacheElement T>
struct AttentionOptions {
  LocalRows<T> local;
  const HeadRows* keep = nullptr;  // cache rows that may be seen; null: all of them
  bool probabilities = false;      // also return the softmax weights
};

struct AttentionResult {
  index_t queries = 0, head_dim_v = 0;
  std::vector<double> output;  // [q_heads][queries][head_dim_v]
  std::vector<double> lse;     // [q_heads][queries]: log of the sum of exp(logit); -inf: sees nothing
  std::vector<std::vector<double>> probabilities;  // [q_heads] of [queries][tokens of its head + local]

  std::span<const double> row(index_t q_head, index_t query) const {
    const auto d = static_cast<std::size_t>(head_dim_v);
    return std::span(output).subspan(
        (static_cast<std::size_t>(q_head) * static_cast<std::size_t>(queries) + static_cast<std::size_t>(query)) * d,
        d);
  }
};

namespace detail {

// A result of the right sizes, its numbers not yet set.
template <CacheElement Q>
AttentionResult sized_result(const CacheShape& s, const AttentionQueries<Q>& queries) {
  AttentionResult out;
  out.queries = static_cast<index_t>(queries.positions.size());
  out.head_dim_v = s.head_dim_v;
  out.lse.resize(static_cast<std::size_t>(s.q_heads) * queries.positions.size());
  out.output.resize(out.lse.size() * static_cast<std::size_t>(s.head_dim_v));
  out.probabilities.resize(static_cast<std::size_t>(s.q_heads));
  return out;
}

// Throws std::invalid_argument, naming layer and sizes, where these do not fit together.
template <class C, class Q>
void check_attention(const C& cache, index_t layer, const AttentionQueries<Q>& queries,
                     const AttentionOptions<typename C::element_type>& options) {
  const CacheShape s = cache.shape();
  if (layer < 0 || layer >= s.layers) fail_argument("attention: layer ", layer, " of ", s.layers);
  if (queries.rows.size() != static_cast<std::size_t>(s.q_heads))
    fail_argument("attention in layer ", layer, ": queries of ", queries.rows.size(), " heads; the model has ",
                  s.q_heads, " query heads");
  for (const auto& q : queries.rows)
    if (q.rows != static_cast<std::int64_t>(queries.positions.size()) || q.cols != s.head_dim_k)
      fail_argument("attention in layer ", layer, ": queries [", q.rows, "][", q.cols, "]; [", queries.positions.size(),
                    "][", s.head_dim_k, "] are needed");
  if (options.keep) {
    std::vector<index_t> tokens;
    for (index_t h = 0; h < s.kv_heads; ++h) tokens.push_back(cache.tokens(layer, h));
    check_keep(layer, tokens, *options.keep);
  }
  const LocalRows<typename C::element_type>& local = options.local;
  if (local.positions.empty()) return;
  const auto heads = static_cast<std::size_t>(s.kv_heads);
  if (local.keys.size() != heads || local.values.size() != heads)
    fail_argument("attention in layer ", layer, ": local rows of ", local.keys.size(), " and ", local.values.size(),
                  " heads; the cache has ", heads);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto rows = static_cast<std::int64_t>(local.positions.size());
    if (local.keys[h].rows != rows || local.values[h].rows != rows || local.keys[h].cols != s.head_dim_k ||
        local.values[h].cols != s.head_dim_v)
      fail_argument("attention in layer ", layer, ", head ", h, ": local rows [", local.keys[h].rows, "][",
                    local.keys[h].cols, "] and [", local.values[h].rows, "][", local.values[h].cols, "]; ", rows,
                    " of ", s.head_dim_k, " and ", s.head_dim_v, " are needed");
  }
}

}  // namespace detail

}  // namespace kvevict::inline KVEVICT_ABI
