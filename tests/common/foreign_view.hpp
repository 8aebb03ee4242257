// An engine's view whose numbers can be wrong.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::testing {

// A foreign view of two layers of two heads with three rows each, whose every number can be set wrong in one head.
struct Foreign {
  using element_type = float;
  using memory_space = host_space;
  std::vector<float> data = std::vector<float>(64);
  std::vector<index_t> position_list{0, 1, 2, 3, 4, 5, 6, 7};
  index_t stated = 3, key_rows = 3, value_rows = 3, positions_shown = 3, key_cols = 2, value_cols = 4;
  bool null_values = false;

  CacheShape shape() const { return {2, 2, 2, 2, 4}; }
  index_t tokens(index_t l, index_t h) const { return odd(l, h) ? stated : 3; }
  Rows<const float> keys(index_t l, index_t h) const {
    return dense_rows(data.data(), odd(l, h) ? key_rows : 3, odd(l, h) ? key_cols : 2);
  }
  Rows<const float> values(index_t l, index_t h) const {
    const float* at = odd(l, h) && null_values ? nullptr : data.data();
    return dense_rows(at, odd(l, h) ? value_rows : 3, odd(l, h) ? value_cols : 4);
  }
  std::span<const index_t> positions(index_t l, index_t h) const {
    return std::span(position_list).first(static_cast<std::size_t>(odd(l, h) ? positions_shown : 3));
  }
  static bool odd(index_t l, index_t h) { return l == 1 && h == 1; }
};

}  // namespace kvevict::testing
