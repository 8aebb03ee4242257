// A cache with a length of its own per (layer, head). The rows of a layer lie head after head in one buffer for keys
// and one for values; compaction happens in place and gives the memory behind the kept rows back to the system.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/cache/check_view.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/cache/detail/layer_rows.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/check_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Layers are independent: different layers may be appended to and compacted by different threads. A view of rows is
// valid until its layer is changed. Copies are deep.
template <CacheElement T>
class RaggedCache {
 public:
  using element_type = T;
  using memory_space = host_space;

  // An empty cache. Throws std::invalid_argument on an impossible shape.
  explicit RaggedCache(const CacheShape& shape) : shape_(shape) {
    check_shape(shape);
    layers_.reserve(static_cast<std::size_t>(shape.layers));
    for (index_t l = 0; l < shape.layers; ++l) layers_.emplace_back(l, shape);
  }

  // A copy of the rows of any host cache of this element type, whatever their strides or blocks. Throws
  // std::invalid_argument where what the view says of a head disagrees (check_head). O(bytes).
  template <KVCacheView V>
  requires(V::memory_space::host&& std::same_as<typename V::element_type, T> &&
           !std::same_as<V, RaggedCache>) explicit RaggedCache(const V& view, const host_exec& exec = {})
      : RaggedCache(view.shape()) {
    for (auto& layer : layers_) layer.assign(exec, view);
    if constexpr (requires {
                    { view.next_position() } -> std::same_as<index_t>;
                  })
      next_position_ = view.next_position();
  }

  CacheShape shape() const noexcept { return shape_; }
  index_t tokens(index_t layer, index_t head) const { return at(layer, head).tokens()[static_cast<std::size_t>(head)]; }
  Rows<const T> keys(index_t layer, index_t head) const& { return at(layer, head).keys(head); }
  Rows<const T> values(index_t layer, index_t head) const& { return at(layer, head).values(head); }
  std::span<const index_t> positions(index_t layer, index_t head) const& { return at(layer, head).positions(head); }

  // No views of a temporary.
  Rows<const T> keys(index_t, index_t) const&& = delete;
  Rows<const T> values(index_t, index_t) const&& = delete;
  std::span<const index_t> positions(index_t, index_t) const&& = delete;

  // Rows and positions to write to, for what changes them in place (re-rotating keys). Positions must stay ascending.
  Rows<T> mutable_keys(index_t layer, index_t head) & { return at(layer, head).keys(head); }
  Rows<T> mutable_values(index_t layer, index_t head) & { return at(layer, head).values(head); }
  std::span<index_t> mutable_positions(index_t layer, index_t head) & { return at(layer, head).positions(head); }

  // Keeps the rows that the plan names, in all heads of a layer at once, merges first. Throws std::invalid_argument,
  // and changes nothing, where the plan does not fit the layer. O(bytes of kept rows); allocates nothing that grows
  // with the rows.
  void compact(const host_exec& exec, index_t layer, const LayerPlan& plan) {
    check_layer("compact", shape_, layer);
    check_plan(layer, at(layer).tokens(), plan);
    at(layer).compact(exec, plan);
  }

  // Adds rows behind each head: keys and values [kv_heads] of [positions][dim]. Positions ascend, from the layer's next
  // position on. Amortised O(bytes of new rows). The new rows must not lie in this layer: that is an error.
  void append(const host_exec& exec, index_t layer, std::span<const Rows<const T>> keys,
              std::span<const Rows<const T>> values, std::span<const index_t> positions) {
    check_layer("append", shape_, layer);
    at(layer).append(exec, keys, values, positions);
  }

  // Makes room for `rows` more rows in each head of a layer, exactly. Throws std::invalid_argument where that is
  // negative, or more than a head or the address space can hold.
  void reserve(index_t layer, index_t rows) {
    check_layer("reserve", shape_, layer);
    at(layer).reserve(rows, true);
  }

  // Position of the next token: one past the newest that any layer has seen, kept or not.
  index_t next_position() const {
    index_t next = next_position_;
    for (const auto& layer : layers_) next = std::max(next, layer.next_position());
    return next;
  }

  // Drops every row at `position` and later: `mark = next_position()`, append, `truncate(mark)` rolls back. What was
  // evicted meanwhile stays evicted. Keeps the memory; O(heads * log tokens). A position past the next one is an error.
  void truncate(index_t position) {
    if (position < 0 || position > next_position())
      fail_argument("truncate: position ", position, "; the next position is ", next_position());
    for (auto& layer : layers_) layer.truncate(position);
    next_position_ = std::min(next_position_, position);
  }

  // Drops the newest `tokens` positions, whichever heads still hold them.
  void trim(index_t tokens) {
    if (tokens < 0 || tokens > next_position())
      fail_argument("trim: ", tokens, " tokens; 0 to ", next_position(), " (the next position) are legal");
    truncate(next_position() - tokens);
  }

  // Says where the next token goes after positions were rewritten (mutable_positions). Throws std::invalid_argument
  // where a row lies at that position or later.
  void renumbered(index_t next_position) {
    check_renumbered(*this, next_position);
    next_position_ = next_position;
    for (auto& layer : layers_) layer.next_position(next_position);
  }

  // Gives the spare rows back that appending left behind.
  void shrink_to_fit() {
    for (auto& layer : layers_) layer.shrink_to_fit();
  }

  // Keys and values of rows that exist; positions (4 bytes a row) are not counted.
  std::size_t bytes_live() const {
    std::int64_t rows = 0;
    for (const auto& layer : layers_) rows += layer.rows();
    return static_cast<std::size_t>(rows) * row_bytes(shape_);
  }
  // Keys and values with spare rows, in whole pages where a buffer is large enough to be mapped.
  std::size_t bytes_reserved() const {
    std::size_t bytes = 0;
    for (const auto& layer : layers_) bytes += layer.bytes_reserved();
    return bytes;
  }
  // What `rows` [layers * kv_heads] take here: each row once. KV heads count, not query heads.
  static std::size_t bytes_for(const CacheShape& shape, std::span<const std::int64_t> rows) {
    std::int64_t sum = 0;
    for (const std::int64_t r : rows) sum += r;
    return static_cast<std::size_t>(sum) * row_bytes(shape);
  }

 protected:
  const detail::LayerRows<T>& at(index_t layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  detail::LayerRows<T>& at(index_t layer) { return layers_[static_cast<std::size_t>(layer)]; }
  // The same for indices that come from outside.
  const detail::LayerRows<T>& at(index_t layer, index_t head) const {
    check_head_index("cache", shape_, layer, head);
    return at(layer);
  }
  detail::LayerRows<T>& at(index_t layer, index_t head) {
    check_head_index("cache", shape_, layer, head);
    return at(layer);
  }
  static std::size_t row_bytes(const CacheShape& s) {
    return (static_cast<std::size_t>(s.head_dim_k) + static_cast<std::size_t>(s.head_dim_v)) * sizeof(T);
  }

 private:
  CacheShape shape_;
  std::vector<detail::LayerRows<T>> layers_;
  index_t next_position_ = 0;
};

static_assert(GrowingCache<RaggedCache<float>, host_exec> && GrowingCache<RaggedCache<fp16_t>, host_exec> &&
              GrowingCache<RaggedCache<bf16_t>, host_exec>);

}  // namespace kvevict::inline KVEVICT_ABI
