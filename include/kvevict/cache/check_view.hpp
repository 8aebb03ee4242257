// Checks of a foreign cache before any of its rows is touched: the numbers that it states must agree.
#pragma once
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Throws std::invalid_argument, naming `who`, layer, head and both numbers, unless the rows of one head are what the
// cache says they are: as many key rows, value rows and positions as tokens, of the widths of its shape, and with a
// newest position that another can follow. O(1).
template <KVCacheView C>
requires(C::memory_space::host) void check_head(std::string_view who, const C& cache, index_t layer, index_t head) {
  const CacheShape shape = cache.shape();
  const auto fail = [&](const auto&... what) { fail_argument(who, ": layer ", layer, ", head ", head, ": ", what...); };
  const index_t tokens = cache.tokens(layer, head);
  if (tokens < 0) fail(tokens, " tokens; 0 or more are required");
  const auto check_rows = [&](const char* what, const auto& rows, index_t width) {
    if (rows.rows != tokens) fail(rows.rows, ' ', what, " rows for ", tokens, " tokens; one a token is required");
    if (rows.cols != width)
      fail(what, " rows of ", rows.cols, " elements; the shape says ", width, " (head_dim_", what[0], ')');
    if (tokens != 0 && rows.data == nullptr) fail("null ", what, " rows for ", tokens, " tokens");
  };
  check_rows("key", cache.keys(layer, head), shape.head_dim_k);
  check_rows("value", cache.values(layer, head), shape.head_dim_v);
  const std::span<const index_t> positions = cache.positions(layer, head);
  if (std::cmp_not_equal(positions.size(), tokens))
    fail(positions.size(), " positions for ", tokens, " tokens; one a token is required");
  constexpr index_t last = std::numeric_limits<index_t>::max() - 1;
  if (!positions.empty() && (positions.back() < 0 || positions.back() > last))
    fail("newest position ", positions.back(), "; 0 to ", last, " are legal");
}

// Throws std::invalid_argument where a row that is to be appended lies in the memory that appending may move.
template <class T, class Inside>
void check_foreign(std::string_view who, index_t layer, std::span<const Rows<const T>> keys,
                   std::span<const Rows<const T>> values, Inside&& inside) {
  for (std::size_t h = 0; h < keys.size(); ++h)
    if (inside(keys[h].data) || inside(values[h].data))
      fail_argument(who, layer, ", head ", h,
                    ": the new rows lie in this cache, which moves as it grows; copy them first");
}

// Throws std::invalid_argument unless `next` follows every position that the cache holds.
template <KVCacheView C>
void check_renumbered(const C& cache, index_t next) {
  const CacheShape shape = cache.shape();
  if (next < 0) fail_argument("renumbered: next position ", next, "; 0 or later is legal");
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h)
      if (const auto p = cache.positions(l, h); !p.empty() && p.back() >= next)
        fail_argument("renumbered: next position ", next, ", but layer ", l, ", head ", h, " holds a row at ",
                      p.back());
}

}  // namespace kvevict::inline KVEVICT_ABI
