// Whether attention over recorded rows can be a number at all: one infinite or undefined value spoils every output that
// it takes part in, and a mean over such outputs says nothing.
#pragma once
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/metrics/attention_query.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// Throws std::domain_error for the first value that is no finite number. what: "key", "head": whose rows they are.
// token: the number of row 0.
template <class T>
void require_finite(const Rows<const T>& rows, std::string_view what, index_t layer, std::string_view whose,
                    index_t head, std::int64_t token) {
  for (std::int64_t r = 0; r < rows.rows; ++r)
    for (index_t c = 0; c < rows.cols; ++c)
      if (const float x = to_float(rows.at(r, c)); !std::isfinite(x))
        fail_domain("layer ", layer, ", ", whose, ' ', head, ", token ", token + r, ": element ", c, " of the ", what,
                    " is ", x, "; finite numbers are required");
}

}  // namespace detail

// Throws std::domain_error naming layer, head and token of the first value of one layer that is no finite number: keys
// before values, lower heads first; then the continuation's own rows (their tokens counted on from the head's last) and
// queries (counted from the first of them). O(values).
template <KVCacheView C, CacheElement Q>
void check_finite(const C& cache, index_t layer, const AttentionQueries<Q>& queries,
                  const LocalRows<typename C::element_type>& local) {
  const index_t heads = cache.shape().kv_heads;
  for (index_t h = 0; h < heads; ++h) {
    detail::require_finite(cache.keys(layer, h), "key", layer, "head", h, 0);
    detail::require_finite(cache.values(layer, h), "value", layer, "head", h, 0);
  }
  for (std::size_t h = 0; h < local.keys.size(); ++h) {
    const auto head = static_cast<index_t>(h);
    detail::require_finite(local.keys[h], "key", layer, "head", head, cache.tokens(layer, head));
    detail::require_finite(local.values[h], "value", layer, "head", head, cache.tokens(layer, head));
  }
  for (std::size_t h = 0; h < queries.rows.size(); ++h)
    detail::require_finite(queries.rows[h], "query", layer, "query head", static_cast<index_t>(h), 0);
}

}  // namespace kvevict::inline KVEVICT_ABI
