// A range of rows, and signed access to parts of a span.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/config.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Positions [begin, end) of a row.
struct IndexRange {
  index_t begin = 0, end = 0;
  KVEVICT_HOST_DEVICE constexpr index_t size() const noexcept { return end - begin; }
  KVEVICT_HOST_DEVICE constexpr bool empty() const noexcept { return end <= begin; }
};

// span[first, first + count).
template <class Span>
constexpr auto slice(Span&& all, std::int64_t first, std::int64_t count) {
  return std::span(all).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

// The entries of one layer of what is [layers * kv_heads].
template <class Span>
constexpr auto layer_of(Span&& all, const CacheShape& shape, index_t layer) {
  return slice(all, shape.at(layer, 0), shape.kv_heads);
}

}  // namespace kvevict::inline KVEVICT_ABI
