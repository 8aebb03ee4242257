// A recorded model run as a cache. As a KVCacheView it shows the prompt rows alone, because that is all a policy may
// look at. The continuation, which tells what an eviction costs, is reached by members of its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What a recording consists of. Everything is row-major; a row of a key or value is one token of the prompt, then of
// the continuation.
template <CacheElement T>
struct Recording {
  struct Layer {
    const T* k = nullptr;  // [kv_heads][positions.size()][head_dim_k], post-RoPE
    const T* v = nullptr;  // [kv_heads][positions.size()][head_dim_v]
    const T* q = nullptr;  // [q_heads][q_positions.size()][head_dim_k], post-RoPE; null where there are no queries
  };
  CacheShape shape;
  index_t prompt_len = 0;
  std::span<const index_t> positions;    // [tokens], ascending
  std::span<const index_t> q_positions;  // the last prompt rows recorded, then every continuation row; may be empty
  std::vector<Layer> layers;             // [shape.layers]
  std::shared_ptr<const void> owner;     // keeps the memory behind all of this, such as a mapped file
};

// Copies are cheap and share the recording.
template <CacheElement T>
class RecordedCache {
 public:
  using element_type = T;
  using memory_space = host_space;

  // Throws std::invalid_argument where the parts do not fit each other.
  explicit RecordedCache(Recording<T> recording) {
    const auto& r = recording;
    check_shape(r.shape);
    const auto total = static_cast<std::int64_t>(r.positions.size());
    if (static_cast<std::int64_t>(r.layers.size()) != r.shape.layers)
      fail_argument("RecordedCache: ", r.layers.size(), " layers for a shape of ", r.shape.layers);
    if (r.prompt_len < 1 || r.prompt_len > total)
      fail_argument("RecordedCache: prompt_len ", r.prompt_len, "; 1 to ", total, " (all rows) is legal");
    const std::int64_t queries = static_cast<std::int64_t>(r.q_positions.size()), after = total - r.prompt_len;
    if (queries != 0 && (queries < after || queries > total))
      fail_argument("RecordedCache: ", queries, " query rows; ", after, " (the continuation) to ", total,
                    " (all rows) are legal");
    recording_ = std::make_shared<const Recording<T>>(std::move(recording));
  }

  CacheShape shape() const noexcept { return recording_->shape; }
  index_t tokens(index_t, index_t) const noexcept { return recording_->prompt_len; }
  Rows<const T> keys(index_t layer, index_t head) const& { return rows(at(layer).k, head, 0, prompt_len(), dim_k()); }
  Rows<const T> values(index_t layer, index_t head) const& { return rows(at(layer).v, head, 0, prompt_len(), dim_v()); }
  std::span<const index_t> positions(index_t, index_t) const& noexcept {
    return recording_->positions.first(static_cast<std::size_t>(prompt_len()));
  }

  index_t prompt_len() const noexcept { return recording_->prompt_len; }
  // Prompt queries that were recorded, newest last: [queries][head_dim_k].
  Rows<const T> prompt_queries(index_t layer, index_t q_head) const& {
    return query_rows(layer, q_head, 0, prompt_query_count());
  }
  std::span<const index_t> prompt_query_positions() const& noexcept {
    return recording_->q_positions.first(static_cast<std::size_t>(prompt_query_count()));
  }

  // ---- the continuation: for measuring ----
  index_t continuation_len() const noexcept { return tokens_total() - prompt_len(); }
  Rows<const T> continuation_keys(index_t layer, index_t head) const& {
    return rows(at(layer).k, head, prompt_len(), continuation_len(), dim_k());
  }
  Rows<const T> continuation_values(index_t layer, index_t head) const& {
    return rows(at(layer).v, head, prompt_len(), continuation_len(), dim_v());
  }
  std::span<const index_t> continuation_positions() const& noexcept {
    return recording_->positions.subspan(static_cast<std::size_t>(prompt_len()));
  }
  // One query per continuation row, at continuation_positions(); no rows where no queries were recorded.
  Rows<const T> continuation_queries(index_t layer, index_t q_head) const& {
    return query_rows(layer, q_head, prompt_query_count(), query_count() - prompt_query_count());
  }

  // What keeps the rows alive beyond this object.
  std::shared_ptr<const void> owner() const noexcept { return recording_; }

  // No views of a temporary: it may be the last that holds the recording.
  Rows<const T> keys(index_t, index_t) const&& = delete;
  Rows<const T> values(index_t, index_t) const&& = delete;
  std::span<const index_t> positions(index_t, index_t) const&& = delete;
  Rows<const T> prompt_queries(index_t, index_t) const&& = delete;
  std::span<const index_t> prompt_query_positions() const&& = delete;
  Rows<const T> continuation_keys(index_t, index_t) const&& = delete;
  Rows<const T> continuation_values(index_t, index_t) const&& = delete;
  std::span<const index_t> continuation_positions() const&& = delete;
  Rows<const T> continuation_queries(index_t, index_t) const&& = delete;

 private:
  const typename Recording<T>::Layer& at(index_t layer) const {
    return recording_->layers[static_cast<std::size_t>(layer)];
  }
  index_t dim_k() const noexcept { return recording_->shape.head_dim_k; }
  index_t dim_v() const noexcept { return recording_->shape.head_dim_v; }
  index_t tokens_total() const noexcept { return static_cast<index_t>(recording_->positions.size()); }
  index_t query_count() const noexcept { return static_cast<index_t>(recording_->q_positions.size()); }
  index_t prompt_query_count() const noexcept { return query_count() == 0 ? 0 : query_count() - continuation_len(); }

  Rows<const T> rows(const T* data, index_t head, index_t first, index_t count, index_t dim) const {
    return dense_rows(data + (std::ptrdiff_t{head} * tokens_total() + first) * dim, count, dim);
  }
  Rows<const T> query_rows(index_t layer, index_t q_head, index_t first, index_t count) const {
    if (count == 0) return dense_rows<const T>(nullptr, 0, dim_k());
    return dense_rows(at(layer).q + (std::ptrdiff_t{q_head} * query_count() + first) * dim_k(), count, dim_k());
  }

  std::shared_ptr<const Recording<T>> recording_;
};

}  // namespace kvevict::inline KVEVICT_ABI
