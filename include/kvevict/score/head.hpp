// One head of one layer as a simple scorer looks at it: rows of floats, whatever the cache's element type, strides and
// blocks.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/detail/row_math.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// Rows of any element type as rows of floats: in place where they lie so, else widened into a buffer.
class FloatRows {
 public:
  FloatRows() = default;
  // buffer: [rows.cols] floats; both must outlive this view.
  template <CacheElement T>
  FloatRows(const Rows<const T>& rows, float* buffer)
      : count_(static_cast<std::size_t>(rows.rows)),
        cols_(static_cast<std::size_t>(rows.cols)),
        rows_(&rows),
        read_(&read<T>),
        buffer_(buffer) {
    if constexpr (std::same_as<T, float>)
      if (rows.col_stride == 1 && rows.blocks == nullptr) {
        in_place_ = rows.data;
        stride_ = rows.row_stride;
      }
  }

  std::size_t size() const noexcept { return count_; }
  std::size_t cols() const noexcept { return cols_; }
  // Valid until the next row is asked for.
  std::span<const float> operator[](std::size_t r) const {
    const auto i = static_cast<std::int64_t>(r);
    return {in_place_ ? in_place_ + i * stride_ : read_(rows_, i, buffer_), cols_};
  }

 private:
  template <class T>
  static const float* read(const void* rows, std::int64_t r, float* buffer) {
    return kvevict::detail::float_row(*static_cast<const Rows<const T>*>(rows), r, buffer);
  }

  std::size_t count_ = 0, cols_ = 0;
  const void* rows_ = nullptr;
  const float* (*read_)(const void*, std::int64_t, float*) = nullptr;
  float* buffer_ = nullptr;
  const float* in_place_ = nullptr;
  std::int64_t stride_ = 0;
};

// A head has no more than its layer was observed with: a scorer says in `needs` what it reads.
class Head {
 public:
  // Floats of working memory that a head of this shape needs.
  static std::size_t buffer_floats(const CacheShape& s) noexcept {
    return 2 * static_cast<std::size_t>(s.head_dim_k) + static_cast<std::size_t>(s.head_dim_v);
  }

  // A view; the observation and the buffer must outlive it. buffer: buffer_floats(o.shape) floats.
  template <CacheElement T>
  Head(const LayerObservation<T>& o, index_t head, float* buffer)
      : layer_(o.layer),
        index_(head),
        group_(static_cast<std::size_t>(o.shape.group())),
        softmax_scale_(o.softmax_scale),
        keys_(o.keys[static_cast<std::size_t>(head)], buffer),
        query_buffer_(buffer + o.shape.head_dim_k + o.shape.head_dim_v),
        rows_at_(&rows_at<T>) {
    const auto h = static_cast<std::size_t>(head);
    if (h < o.values.size()) values_ = FloatRows(o.values[h], buffer + o.shape.head_dim_k);
    if (h < o.positions.size()) positions_ = o.positions[h];
    if (!o.extras.future_queries.empty()) future_queries_ = o.extras.future_queries.subspan(h * group_, group_).data();
  }

  index_t layer() const noexcept { return layer_; }
  index_t index() const noexcept { return index_; }  // of the KV head in its layer
  std::size_t tokens() const noexcept { return keys_.size(); }
  std::size_t key_dim() const noexcept { return keys_.cols(); }
  std::size_t group() const noexcept { return group_; }  // query heads that share this head
  float softmax_scale() const noexcept { return softmax_scale_; }

  // Key and value of row t as the cache holds them, [head_dim_k] and [head_dim_v]; each is valid until the next one of
  // its kind is asked for.
  std::span<const float> key(std::size_t t) const { return keys_[t]; }
  std::span<const float> value(std::size_t t) const { return values_[t]; }
  index_t position(std::size_t t) const { return positions_[t]; }  // in the prompt

  // Queries of the continuation, [continuation][head_dim_k], of one query head of the group.
  FloatRows future_queries(std::size_t query_head) const {
    return rows_at_(future_queries_, query_head, query_buffer_);
  }

 private:
  template <class T>
  static FloatRows rows_at(const void* heads, std::size_t i, float* buffer) {
    return FloatRows(static_cast<const Rows<const T>*>(heads)[i], buffer);
  }

  index_t layer_, index_;
  std::size_t group_;
  float softmax_scale_;
  FloatRows keys_, values_;
  std::span<const index_t> positions_;
  float* query_buffer_;
  FloatRows (*rows_at_)(const void*, std::size_t, float*);
  const void* future_queries_ = nullptr;  // Rows of the cache's element type, [group]
};

}  // namespace kvevict::inline KVEVICT_ABI::score
