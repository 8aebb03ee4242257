// The shape of a KV cache, and the integer type that counts its rows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Layers, heads, tokens and positions. Element offsets are std::int64_t.
using index_t = std::int32_t;

// One shape for all layers of a model (a stated limit). "head" alone is always a KV head.
struct CacheShape {
  index_t layers = 0, kv_heads = 0, q_heads = 0, head_dim_k = 0, head_dim_v = 0;

  // Query heads per KV head; query head h reads KV head h / group().
  constexpr index_t group() const noexcept { return q_heads / kv_heads; }
  // (layer, head) pairs.
  constexpr std::int64_t heads_total() const noexcept { return std::int64_t{layers} * kv_heads; }
  // Position of (layer, head) in arrays over all heads.
  constexpr std::int64_t at(index_t layer, index_t head) const noexcept {
    return std::int64_t{layer} * kv_heads + head;
  }
  friend constexpr bool operator==(const CacheShape&, const CacheShape&) = default;
};

// Throws std::invalid_argument unless every count is positive and the query heads divide evenly over the KV heads.
inline void check_shape(const CacheShape& s) {
  if (s.layers < 1 || s.kv_heads < 1 || s.q_heads < 1 || s.head_dim_k < 1 || s.head_dim_v < 1)
    fail_argument("CacheShape: layers ", s.layers, ", kv_heads ", s.kv_heads, ", q_heads ", s.q_heads, ", head_dim_k ",
                  s.head_dim_k, ", head_dim_v ", s.head_dim_v, "; each must be at least 1");
  if (s.q_heads % s.kv_heads != 0)
    fail_argument("CacheShape: ", s.q_heads, " query heads do not divide evenly over ", s.kv_heads, " KV heads");
}

// Throws std::invalid_argument, naming `who`, unless the layer exists.
inline void check_layer(std::string_view who, const CacheShape& shape, index_t layer) {
  if (layer < 0 || layer >= shape.layers)
    fail_argument(who, ": layer ", layer, " does not exist; 0 to ", shape.layers - 1, " do");
}
// The same for a layer and one of its KV heads.
inline void check_head_index(std::string_view who, const CacheShape& shape, index_t layer, index_t head) {
  check_layer(who, shape, layer);
  if (head < 0 || head >= shape.kv_heads)
    fail_argument(who, ": layer ", layer, " has no head ", head, "; 0 to ", shape.kv_heads - 1, " exist");
}

// Throws std::invalid_argument unless `entries` numbers, one a head, are those of whole layers.
inline void check_whole_layers(const CacheShape& shape, std::size_t entries) {
  if (entries % static_cast<std::size_t>(shape.kv_heads) != 0)
    fail_argument(entries, " numbers of rows are no whole layers of ", shape.kv_heads, " heads");
}

}  // namespace kvevict::inline KVEVICT_ABI
