// A cache in blocks of rows with a block table per (layer, head), as paged engines keep it. All layers and heads share
// one pool: blocks that eviction empties serve whoever grows next, so a prefill that evicts layer by layer reuses the
// blocks of the layer before.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "kvevict/cache/check_view.hpp"
#include "kvevict/cache/compact_rows.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/cache/detail/page_buffer.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/check_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// As the pool is shared, only one call at a time may change the cache, and any change ends the validity of all views of
// its rows. Copies are deep.
template <CacheElement T>
class PagedCache {
 public:
  using element_type = T;
  using memory_space = host_space;

  static constexpr index_t default_block_rows = 16;

  // An empty cache. Throws std::invalid_argument on an impossible shape or block_rows < 1.
  explicit PagedCache(const CacheShape& shape, index_t block_rows = default_block_rows)
      : shape_(shape), block_rows_(block_rows) {
    check_shape(shape);
    if (block_rows < 1) fail_argument("PagedCache: ", block_rows, " rows in a block; at least 1 is required");
    heads_.resize(static_cast<std::size_t>(shape.heads_total()));
    next_.assign(static_cast<std::size_t>(shape.layers), 0);
  }

  // A copy of the rows of any host cache of this element type. Throws std::invalid_argument where what the view says of
  // a head disagrees (check_head). O(bytes).
  template <KVCacheView V>
  requires(V::memory_space::host&& std::same_as<typename V::element_type, T> &&
           !std::same_as<V, PagedCache>) explicit PagedCache(const V& view, const host_exec& exec = {},
                                                             index_t block_rows = default_block_rows)
      : PagedCache(view.shape(), block_rows) {
    std::int64_t blocks = 0;
    for (index_t l = 0; l < shape_.layers; ++l)
      for (index_t h = 0; h < shape_.kv_heads; ++h) {
        check_head("copy of a cache", view, l, h);
        blocks += blocks_for(view.tokens(l, h));
      }
    grow_pool(blocks);
    for (index_t l = 0; l < shape_.layers; ++l)
      for (index_t h = 0; h < shape_.kv_heads; ++h) {
        const auto p = view.positions(l, h);
        extend(at(l, h), p);
        if (!p.empty()) next_[static_cast<std::size_t>(l)] = std::max(next_[static_cast<std::size_t>(l)], p.back() + 1);
      }
    parallel_for(exec, shape_.heads_total(), [&](std::int64_t i) {
      const auto l = static_cast<index_t>(i / shape_.kv_heads), h = static_cast<index_t>(i % shape_.kv_heads);
      copy_rows(at(l, h), 0, view.keys(l, h), view.values(l, h));
    });
    if constexpr (requires {
                    { view.next_position() } -> std::same_as<index_t>;
                  })
      next_position_ = view.next_position();
  }

  CacheShape shape() const noexcept { return shape_; }
  index_t block_rows() const noexcept { return block_rows_; }
  index_t tokens(index_t layer, index_t head) const { return tokens(at(layer, head)); }
  Rows<const T> keys(index_t layer, index_t head) const& {
    return rows<const T>(keys_.data(), at(layer, head), shape_.head_dim_k);
  }
  Rows<const T> values(index_t layer, index_t head) const& {
    return rows<const T>(values_.data(), at(layer, head), shape_.head_dim_v);
  }
  std::span<const index_t> positions(index_t layer, index_t head) const& { return at(layer, head).positions; }
  // Blocks of the pool that hold the rows of a head, in order; row r is row r % block_rows of block r / block_rows.
  std::span<const index_t> block_table(index_t layer, index_t head) const& { return at(layer, head).blocks; }

  // No views of a temporary.
  Rows<const T> keys(index_t, index_t) const&& = delete;
  Rows<const T> values(index_t, index_t) const&& = delete;
  std::span<const index_t> positions(index_t, index_t) const&& = delete;
  std::span<const index_t> block_table(index_t, index_t) const&& = delete;

  // Rows and positions to write to, for what changes them in place (re-rotating keys). Positions must stay ascending.
  Rows<T> mutable_keys(index_t layer, index_t head) & {
    return rows<T>(keys_.data(), at(layer, head), shape_.head_dim_k);
  }
  Rows<T> mutable_values(index_t layer, index_t head) & {
    return rows<T>(values_.data(), at(layer, head), shape_.head_dim_v);
  }
  std::span<index_t> mutable_positions(index_t layer, index_t head) & { return at(layer, head).positions; }

  // Keeps the rows that the plan names, merges first; emptied blocks go back to the pool, and where more than half of
  // the pool is free then, it shrinks to the blocks in use. Throws std::invalid_argument, and changes nothing, where
  // the plan does not fit the layer. O(bytes of kept rows), amortised.
  void compact(const host_exec& exec, index_t layer, const LayerPlan& plan) {
    check_layer("compact", shape_, layer);
    std::vector<index_t> before(static_cast<std::size_t>(shape_.kv_heads));
    for (index_t h = 0; h < shape_.kv_heads; ++h) before[static_cast<std::size_t>(h)] = tokens(layer, h);
    check_plan(layer, before, plan);
    merge_values<T>(plan.merges, [&](index_t h) { return mutable_values(layer, h); });
    parallel_for(exec, shape_.kv_heads, [&](std::int64_t i) {
      const auto h = static_cast<index_t>(i);
      const auto keep = plan.keep.head(h);
      compact_rows(mutable_keys(layer, h), keep);
      compact_rows(mutable_values(layer, h), keep);
      auto& p = at(layer, h).positions;
      for (std::size_t r = 0; r < keep.size(); ++r) p[r] = p[static_cast<std::size_t>(keep[r])];
      p.resize(keep.size());
    });
    for (index_t h = 0; h < shape_.kv_heads; ++h) return_blocks(at(layer, h));
    if (free_.size() > pool_blocks() / 2) shrink_to_fit();
  }

  // Adds rows behind each head: keys and values [kv_heads] of [positions][dim]. Positions ascend, from the layer's next
  // position on. Amortised O(bytes of new rows). The new rows must not lie in this cache: that is an error.
  void append(const host_exec&, index_t layer, std::span<const Rows<const T>> keys,
              std::span<const Rows<const T>> values, std::span<const index_t> positions) {
    check_layer("append", shape_, layer);
    check_append<T>(layer, shape_, next_[static_cast<std::size_t>(layer)], keys, values, positions);
    if (positions.empty()) return;
    check_foreign("append to layer ", layer, keys, values,
                  [&](const void* p) { return keys_.contains(p) || values_.contains(p); });
    std::int64_t missing = -static_cast<std::int64_t>(free_.size());
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      const Head& head = at(layer, h);
      missing += blocks_for(tokens(head) + static_cast<std::int64_t>(positions.size())) -
                 static_cast<std::int64_t>(head.blocks.size());
    }
    if (missing > 0) grow_pool(std::max(missing, static_cast<std::int64_t>(pool_blocks() / 4)));
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      Head& head = at(layer, h);
      const std::int64_t first = tokens(head);
      extend(head, positions);
      copy_rows(head, first, keys[static_cast<std::size_t>(h)], values[static_cast<std::size_t>(h)]);
    }
    next_[static_cast<std::size_t>(layer)] = positions.back() + 1;
  }

  // Position of the next token: one past the newest that any layer has seen, kept or not.
  index_t next_position() const { return std::max(next_position_, *std::max_element(next_.begin(), next_.end())); }

  // Drops every row at `position` and later: `mark = next_position()`, append, `truncate(mark)` rolls back. What was
  // evicted meanwhile stays evicted. Emptied blocks go back to the pool. A position past the next one is an error.
  void truncate(index_t position) {
    if (position < 0 || position > next_position())
      fail_argument("truncate: position ", position, "; the next position is ", next_position());
    for (Head& head : heads_) {
      auto& p = head.positions;
      p.erase(std::lower_bound(p.begin(), p.end(), position), p.end());
      return_blocks(head);
    }
    for (index_t& next : next_) next = std::min(next, position);
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
    std::fill(next_.begin(), next_.end(), next_position);
  }

  // Blocks of the pool, and those of them that no head uses.
  std::size_t pool_blocks() const noexcept { return static_cast<std::size_t>(pool_blocks_); }
  std::size_t free_blocks() const noexcept { return free_.size(); }

  // Moves the blocks at the end of the pool into free ones before them and gives the end back. O(bytes moved).
  void shrink_to_fit() {
    const auto used = static_cast<index_t>(pool_blocks() - free_.size());
    std::sort(free_.begin(), free_.end(), std::greater<>());
    for (Head& head : heads_)
      for (index_t& block : head.blocks)
        if (block >= used) {
          const index_t hole = free_.back();  // the lowest: there are as many holes below `used` as blocks above it
          free_.pop_back();
          std::memcpy(keys_.data() + key_bytes(hole), keys_.data() + key_bytes(block), key_bytes(1));
          std::memcpy(values_.data() + value_bytes(hole), values_.data() + value_bytes(block), value_bytes(1));
          block = hole;
        }
    free_.clear();
    pool_blocks_ = used;
    resize_pool();
  }

  // Keys and values of rows that exist; positions (4 bytes a row) are not counted.
  std::size_t bytes_live() const {
    std::int64_t sum = 0;
    for (const Head& head : heads_) sum += tokens(head);
    return static_cast<std::size_t>(sum) * row_bytes(shape_);
  }
  // The whole pool: partly filled and free blocks are held too.
  std::size_t bytes_reserved() const noexcept { return keys_.reserved() + values_.reserved(); }
  // What `rows` [layers * kv_heads] take here: whole blocks.
  static std::size_t bytes_for(const CacheShape& shape, std::span<const std::int64_t> rows,
                               index_t block_rows = default_block_rows) {
    std::int64_t sum = 0;
    for (const std::int64_t r : rows) sum += (r + block_rows - 1) / block_rows * block_rows;
    return static_cast<std::size_t>(sum) * row_bytes(shape);
  }

 private:
  struct Head {
    std::vector<index_t> blocks, positions;
  };

  static std::size_t row_bytes(const CacheShape& s) {
    return (static_cast<std::size_t>(s.head_dim_k) + static_cast<std::size_t>(s.head_dim_v)) * sizeof(T);
  }
  static index_t tokens(const Head& head) { return static_cast<index_t>(head.positions.size()); }
  std::int64_t blocks_for(std::int64_t rows) const { return (rows + block_rows_ - 1) / block_rows_; }
  std::size_t key_bytes(std::int64_t blocks) const {
    return static_cast<std::size_t>(blocks * block_rows_ * shape_.head_dim_k) * sizeof(T);
  }
  std::size_t value_bytes(std::int64_t blocks) const {
    return static_cast<std::size_t>(blocks * block_rows_ * shape_.head_dim_v) * sizeof(T);
  }
  Head& at(index_t layer, index_t head) {
    check_head_index("cache", shape_, layer, head);
    return heads_[static_cast<std::size_t>(shape_.at(layer, head))];
  }
  const Head& at(index_t layer, index_t head) const {
    check_head_index("cache", shape_, layer, head);
    return heads_[static_cast<std::size_t>(shape_.at(layer, head))];
  }

  template <class E, class Byte>
  Rows<E> rows(Byte* pool, const Head& head, index_t cols) const {
    Rows<E> out = dense_rows(reinterpret_cast<E*>(pool), tokens(head), cols);
    out.blocks = head.blocks.data();
    out.block_rows = block_rows_;
    out.block_stride = std::int64_t{block_rows_} * cols;
    return out;
  }

  void resize_pool() {
    keys_.resize(key_bytes(pool_blocks_));
    values_.resize(value_bytes(pool_blocks_));
  }
  void grow_pool(std::int64_t blocks) {
    const std::int64_t old = pool_blocks_;
    free_.reserve(free_.size() + static_cast<std::size_t>(blocks));
    keys_.resize(key_bytes(old + blocks));
    values_.resize(value_bytes(old + blocks));
    pool_blocks_ = old + blocks;
    for (std::int64_t b = pool_blocks_; b-- > old;) free_.push_back(static_cast<index_t>(b));  // lowest is taken first
  }
  void return_blocks(Head& head) {
    const auto used = static_cast<std::size_t>(blocks_for(tokens(head)));
    while (head.blocks.size() > used) {
      free_.push_back(head.blocks.back());
      head.blocks.pop_back();
    }
  }

  // Room for rows at these positions behind those of a head; the pool has the blocks.
  void extend(Head& head, std::span<const index_t> positions) {
    head.positions.insert(head.positions.end(), positions.begin(), positions.end());
    for (auto n = static_cast<std::size_t>(blocks_for(tokens(head))); head.blocks.size() < n; free_.pop_back())
      head.blocks.push_back(free_.back());
  }
  // Writes rows from row `first` of a head on.
  void copy_rows(const Head& head, std::int64_t first, const Rows<const T>& keys, const Rows<const T>& values) {
    const auto copy = [&](const Rows<T>& to, const Rows<const T>& from) {
      for (std::int64_t r = 0; r < from.rows; ++r) {
        const T* source = from.row(r);
        T* row = to.row(first + r);
        if (from.col_stride == 1) std::copy_n(source, from.cols, row);
        else
          for (index_t c = 0; c < from.cols; ++c) row[c] = source[c * from.col_stride];
      }
    };
    copy(rows<T>(keys_.data(), head, shape_.head_dim_k), keys);
    copy(rows<T>(values_.data(), head, shape_.head_dim_v), values);
  }

  CacheShape shape_;
  index_t block_rows_;
  std::vector<Head> heads_;    // [layers * kv_heads]
  std::vector<index_t> next_;  // [layers]
  index_t next_position_ = 0;
  std::vector<index_t> free_;  // taken from the back
  detail::PageBuffer keys_, values_;
  std::int64_t pool_blocks_ = 0;
};

static_assert(GrowingCache<PagedCache<float>, host_exec> && GrowingCache<PagedCache<fp16_t>, host_exec> &&
              GrowingCache<PagedCache<bf16_t>, host_exec>);

}  // namespace kvevict::inline KVEVICT_ABI
