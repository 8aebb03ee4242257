// The rows of one layer, head after head in one buffer for keys and one for values: what DenseCache and RaggedCache are
// made of. Each head owns an area of whole rows; the areas follow each other as in CSR, and may end in spare rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/cache/check_view.hpp"
#include "kvevict/cache/compact_rows.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/cache/detail/page_buffer.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/check_plan.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Copies rows of any strides or blocks to consecutive rows.
template <CacheElement T>
void copy_rows(std::byte* to, const Rows<const T>& from) {
  const std::size_t row_bytes = static_cast<std::size_t>(from.cols) * sizeof(T);
  if (from.rows == 0) return;
  if (from.col_stride == 1 && !from.blocks && from.row_stride == from.cols) {
    std::memcpy(to, from.data, static_cast<std::size_t>(from.rows) * row_bytes);
    return;
  }
  for (std::int64_t r = 0; r < from.rows; ++r, to += row_bytes) {
    const T* row = from.row(r);
    if (from.col_stride == 1) {
      std::memcpy(to, row, row_bytes);
    } else {
      for (index_t c = 0; c < from.cols; ++c)
        std::memcpy(to + static_cast<std::size_t>(c) * sizeof(T), row + c * from.col_stride, sizeof(T));
    }
  }
}

// Work below this size is not worth a second thread.
inline constexpr std::size_t parallel_from_bytes = std::size_t{1} << 20;

template <CacheElement T>
class LayerRows {
 public:
  LayerRows(index_t layer, const CacheShape& shape)
      : shape_(shape),
        layer_(layer),
        first_(static_cast<std::size_t>(shape.kv_heads) + 1, 0),
        tokens_(static_cast<std::size_t>(shape.kv_heads), 0) {}

  std::span<const index_t> tokens() const noexcept { return tokens_; }
  std::int64_t rows() const { return std::accumulate(tokens_.begin(), tokens_.end(), std::int64_t{0}); }
  // First row of each head's area, [kv_heads + 1].
  std::span<const std::int64_t> areas() const noexcept { return first_; }
  index_t next_position() const noexcept { return next_position_; }
  void next_position(index_t p) noexcept { next_position_ = p; }

  Rows<T> keys(index_t h) { return dense_rows(at(key_rows_, h, shape_.head_dim_k), count(h), shape_.head_dim_k); }
  Rows<T> values(index_t h) { return dense_rows(at(value_rows_, h, shape_.head_dim_v), count(h), shape_.head_dim_v); }
  Rows<const T> keys(index_t h) const {
    return dense_rows(at(key_rows_, h, shape_.head_dim_k), count(h), shape_.head_dim_k);
  }
  Rows<const T> values(index_t h) const {
    return dense_rows(at(value_rows_, h, shape_.head_dim_v), count(h), shape_.head_dim_v);
  }
  std::span<index_t> positions(index_t h) {
    return {reinterpret_cast<index_t*>(positions_.data()) + first_[static_cast<std::size_t>(h)],
            static_cast<std::size_t>(count(h))};
  }
  std::span<const index_t> positions(index_t h) const {
    return {reinterpret_cast<const index_t*>(positions_.data()) + first_[static_cast<std::size_t>(h)],
            static_cast<std::size_t>(count(h))};
  }
  std::size_t bytes_reserved() const noexcept { return key_rows_.reserved() + value_rows_.reserved(); }

  // Copies the rows of one layer of another cache; the areas become exact.
  template <KVCacheView V>
  void assign(const host_exec& exec, const V& view) {
    const index_t heads = shape_.kv_heads;
    for (index_t h = 0; h < heads; ++h) {
      const auto i = static_cast<std::size_t>(h);
      check_head("copy of a cache", view, layer_, h);
      tokens_[i] = view.tokens(layer_, h);
      first_[i + 1] = first_[i] + tokens_[i];
    }
    resize_buffers();
    parallel_for(threads_for(exec, rows()), heads, [&](std::int64_t i) {
      const auto h = static_cast<index_t>(i);
      copy_head(h, 0, view.keys(layer_, h), view.values(layer_, h), view.positions(layer_, h));
    });
    for (index_t h = 0; h < heads; ++h)
      if (count(h) != 0) next_position_ = std::max(next_position_, positions(h).back() + 1);
  }

  // Room for `more` rows in each head. Grows all heads at once, by a quarter of their mean where little is asked for,
  // so that single appends move a layer O(log rows) times. A request that doubles the layer is met exactly.
  void reserve(index_t more, bool exactly) {
    for (std::size_t h = 0; h < tokens_.size(); ++h)
      if (more < 0 || more > std::numeric_limits<index_t>::max() - tokens_[h])
        fail_argument("reserve in layer ", layer_, ", head ", h, ": ", more, " more rows; 0 to ",
                      std::numeric_limits<index_t>::max() - tokens_[h], " are legal");
    bool fits = true;
    for (std::size_t h = 0; h < tokens_.size(); ++h) fits = fits && tokens_[h] + std::int64_t{more} <= area(h);
    if (fits) return;
    const std::int64_t mean = rows() / shape_.kv_heads;
    const std::int64_t spare = exactly || more >= mean ? more : std::max<std::int64_t>(more, growth(mean));
    std::vector<std::int64_t> first(first_.size(), 0);
    for (std::size_t h = 0; h < tokens_.size(); ++h) first[h + 1] = first[h] + std::max(area(h), tokens_[h] + spare);
    grow(std::move(first));
  }

  void append(const host_exec& exec, std::span<const Rows<const T>> keys, std::span<const Rows<const T>> values,
              std::span<const index_t> positions) {
    check_append<T>(layer_, shape_, next_position_, keys, values, positions);
    if (positions.empty()) return;
    check_foreign("append to layer ", layer_, keys, values,
                  [&](const void* p) { return key_rows_.contains(p) || value_rows_.contains(p); });
    const auto more = static_cast<index_t>(positions.size());
    reserve(more, false);
    parallel_for(threads_for(exec, std::int64_t{more} * shape_.kv_heads), shape_.kv_heads, [&](std::int64_t i) {
      const auto h = static_cast<std::size_t>(i);
      copy_head(static_cast<index_t>(i), tokens_[h], keys[h], values[h], positions);
      tokens_[h] += more;
    });
    next_position_ = positions.back() + 1;
  }

  // The plan has passed check_plan. Merges, then moves the kept rows to the front of smaller areas and gives back the
  // rest. Spare rows that appending had made stay, up to what appending would make again: a loop that appends a row and
  // drops one never reallocates.
  void compact(const host_exec& exec, const LayerPlan& plan) {
    merge_values<T>(plan.merges, [&](index_t h) { return values(h); });
    const std::vector<index_t> kept = kept_rows(plan.keep);
    if (kept == tokens_) return;
    std::vector<std::int64_t> first(first_.size(), 0);
    bool spare = false;
    for (std::size_t h = 0; h < kept.size(); ++h) {
      const std::int64_t spare_rows = area(h) - tokens_[h];
      spare = spare || spare_rows != 0;
      first[h + 1] = first[h] + kept[h] + std::min(spare_rows, growth(kept[h]));
    }
    if (spare && first.back() > first_.back() - first_.back() / 8) first = first_;
    move(exec, plan.keep, first);
    first_ = std::move(first);
    tokens_ = kept;
    resize_buffers();
  }

  // Drops the rows at `position` and later. The areas stay.
  void truncate(index_t position) {
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      const auto p = positions(h);
      tokens_[static_cast<std::size_t>(h)] =
          static_cast<index_t>(std::lower_bound(p.begin(), p.end(), position) - p.begin());
    }
    next_position_ = std::min(next_position_, position);
  }

  // Gives all spare rows back.
  void shrink_to_fit() {
    std::vector<std::int64_t> first(first_.size(), 0);
    for (std::size_t h = 0; h < tokens_.size(); ++h) first[h + 1] = first[h] + tokens_[h];
    if (first == first_) return;
    for (auto [buffer, row_bytes] : buffers())
      for (std::size_t h = 0; h < tokens_.size(); ++h)
        std::memmove(buffer->data() + offset(first[h], row_bytes), buffer->data() + offset(first_[h], row_bytes),
                     offset(tokens_[h], row_bytes));
    first_ = std::move(first);
    resize_buffers();
  }

 private:
  struct Buffer {
    PageBuffer* rows;
    std::size_t row_bytes;
  };
  std::vector<Buffer> buffers() {
    return {{&key_rows_, static_cast<std::size_t>(shape_.head_dim_k) * sizeof(T)},
            {&value_rows_, static_cast<std::size_t>(shape_.head_dim_v) * sizeof(T)},
            {&positions_, sizeof(index_t)}};
  }
  static std::size_t offset(std::int64_t rows, std::size_t row_bytes) noexcept {
    return static_cast<std::size_t>(rows) * row_bytes;
  }
  static std::int64_t growth(std::int64_t rows) noexcept { return std::max<std::int64_t>(16, rows / 4); }
  std::int64_t area(std::size_t h) const noexcept { return first_[h + 1] - first_[h]; }
  std::int64_t count(index_t h) const { return tokens_[static_cast<std::size_t>(h)]; }
  T* at(PageBuffer& rows, index_t h, index_t cols) {
    return reinterpret_cast<T*>(rows.data()) + first_[static_cast<std::size_t>(h)] * cols;
  }
  const T* at(const PageBuffer& rows, index_t h, index_t cols) const {
    return reinterpret_cast<const T*>(rows.data()) + first_[static_cast<std::size_t>(h)] * cols;
  }
  host_exec threads_for(const host_exec& exec, std::int64_t rows) const {
    const auto row_bytes = static_cast<std::size_t>(shape_.head_dim_k + shape_.head_dim_v) * sizeof(T);
    return offset(rows, row_bytes) < parallel_from_bytes ? host_exec{1, nullptr} : exec;
  }
  void resize_buffers() {
    check_size(first_);
    for (auto [buffer, row_bytes] : buffers()) buffer->resize(offset(first_.back(), row_bytes));
  }
  void copy_head(index_t h, std::int64_t row, const Rows<const T>& keys, const Rows<const T>& values,
                 std::span<const index_t> positions) {
    const std::int64_t to = first_[static_cast<std::size_t>(h)] + row;
    if (positions.empty()) return;
    copy_rows(key_rows_.data() + offset(to, static_cast<std::size_t>(shape_.head_dim_k) * sizeof(T)), keys);
    copy_rows(value_rows_.data() + offset(to, static_cast<std::size_t>(shape_.head_dim_v) * sizeof(T)), values);
    std::memcpy(positions_.data() + offset(to, sizeof(index_t)), positions.data(), positions.size_bytes());
  }

  // All rows of the layer must have an address.
  void check_size(const std::vector<std::int64_t>& first) {
    for (auto [buffer, row_bytes] : buffers())
      if (static_cast<std::size_t>(first.back()) > std::numeric_limits<std::ptrdiff_t>::max() / row_bytes)
        fail_argument("layer ", layer_, ": ", first.back(), " rows of ", row_bytes,
                      " bytes are more than can be addressed");
  }

  // Larger areas: the last head moves first.
  void grow(std::vector<std::int64_t> first) {
    check_size(first);
    for (auto [buffer, row_bytes] : buffers()) buffer->resize(offset(first.back(), row_bytes));
    for (auto [buffer, row_bytes] : buffers())
      for (std::size_t h = tokens_.size(); h-- > 0;)
        if (tokens_[h] != 0)
          std::memmove(buffer->data() + offset(first[h], row_bytes), buffer->data() + offset(first_[h], row_bytes),
                       offset(tokens_[h], row_bytes));
    first_ = std::move(first);
  }

  // Moves kept rows into areas that begin at or below the present ones. Keys and values are independent; so are heads
  // where no area moves.
  void move(const host_exec& exec, const HeadRows& keep, const std::vector<std::int64_t>& first) {
    const auto all = buffers();
    const auto heads = static_cast<std::int64_t>(tokens_.size());
    const auto head = [&](const Buffer& b, std::int64_t h) {
      const auto i = static_cast<std::size_t>(h);
      std::byte* rows = b.rows->data();
      const auto kept = keep.head(static_cast<index_t>(h));
      if (!kept.empty())
        compact_rows(rows + offset(first[i], b.row_bytes), rows + offset(first_[i], b.row_bytes), b.row_bytes, kept);
    };
    const host_exec inner = threads_for(exec, first.back());
    if (first == first_) {
      parallel_for(inner, heads * static_cast<std::int64_t>(all.size()),
                   [&](std::int64_t i) { head(all[static_cast<std::size_t>(i / heads)], i % heads); });
    } else {
      parallel_for(inner, static_cast<std::int64_t>(all.size()), [&](std::int64_t i) {
        for (std::int64_t h = 0; h < heads; ++h) head(all[static_cast<std::size_t>(i)], h);
      });
    }
  }

  CacheShape shape_;
  index_t layer_;
  std::vector<std::int64_t> first_;
  std::vector<index_t> tokens_;
  PageBuffer key_rows_, value_rows_, positions_;
  index_t next_position_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
