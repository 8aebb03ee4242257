// A device cache in blocks of rows with a block table per (layer, head), as paged engines keep it. Compaction is in
// place and keeps the order of rows; emptied blocks are listed on the device for the engine that owns the pool.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/cache.cuh"
#include "kvevict/cuda/compact.cuh"
#include "kvevict/cuda/exec.cuh"

namespace kvevict::inline KVEVICT_ABI {

// Positions lie in plain arrays beside the pool. Views as in CudaCache.
template <CacheElement T>
class CudaPagedCache : public CudaCache<T> {
  using Base = CudaCache<T>;
  using Base::shape_;

 public:
  static constexpr index_t default_block_rows = 16;

  // A copy of a host cache, block after block. Waits.
  template <KVCacheView V>
  requires(V::memory_space::host)
      CudaPagedCache(const cuda_exec& exec, const V& view, index_t block_rows = default_block_rows)
      : Base(exec, view), block_rows_(block_rows) {
    if (block_rows < 1) fail_argument("CudaPagedCache: ", block_rows, " rows in a block; at least 1 is required");
    std::int64_t blocks = 0;
    for (index_t l = 0; l < shape_.layers; ++l)
      for (index_t h = 0; h < shape_.kv_heads; ++h) {
        const index_t n = cuda::ceil_div(view.tokens(l, h), block_rows);
        blocks += n;
        stride_ = std::max(stride_, n);
      }
    blocks_ = blocks;
    std::vector<index_t> table(static_cast<std::size_t>(shape_.heads_total() * stride_), 0);
    keys_ = cuda::DeviceArray<T>(exec, blocks * block_rows * shape_.head_dim_k);
    values_ = cuda::DeviceArray<T>(exec, blocks * block_rows * shape_.head_dim_v);
    positions_ = cuda::DeviceArray<index_t>(exec, shape_.heads_total() * stride_ * block_rows);
    freed_ = cuda::DeviceArray<index_t>(exec, blocks + 1);  // the last entry counts them
    cuda::check(cudaMemsetAsync(freed_.data() + blocks, 0, sizeof(index_t), exec.stream), "CudaPagedCache");
    std::int64_t next = 0;
    for (index_t l = 0; l < shape_.layers; ++l)
      for (index_t h = 0; h < shape_.kv_heads; ++h) {
        const std::int64_t at = shape_.at(l, h), n = cuda::ceil_div(view.tokens(l, h), block_rows);
        std::iota(table.begin() + static_cast<std::ptrdiff_t>(at * stride_),
                  table.begin() + static_cast<std::ptrdiff_t>(at * stride_ + n), static_cast<index_t>(next));
        cuda::copy_to_device(exec, view.keys(l, h), keys_.data() + next * block_rows * shape_.head_dim_k);
        cuda::copy_to_device(exec, view.values(l, h), values_.data() + next * block_rows * shape_.head_dim_v);
        const auto p = view.positions(l, h);
        cuda::copy_to_device(exec, dense_rows(p.data(), std::ssize(p), 1),
                             positions_.data() + at * stride_ * block_rows);
        next += n;
      }
    table_ = cuda::copied(exec, std::span<const index_t>(table));
  }

  index_t block_rows() const noexcept { return block_rows_; }
  Rows<const T> keys(index_t layer, index_t head) const { return rows(layer, head, keys_.data(), shape_.head_dim_k); }
  Rows<const T> values(index_t layer, index_t head) const {
    return rows(layer, head, values_.data(), shape_.head_dim_v);
  }
  std::span<const index_t> positions(index_t layer, index_t head) const {
    return {positions_.data() + shape_.at(layer, head) * stride_ * block_rows_,
            static_cast<std::size_t>(Base::tokens(layer, head))};
  }
  // Blocks of the pool, and the table of a layer, [kv_heads][table_stride], in device memory.
  std::int64_t pool_blocks() const noexcept { return blocks_; }
  index_t table_stride() const noexcept { return stride_; }
  const index_t* device_table(index_t layer) const { return table_.data() + shape_.at(layer, 0) * stride_; }
  // Emptied blocks so far, in the order in which compactions emptied them. Waits.
  std::vector<index_t> freed_blocks(const cuda_exec& exec) const {
    const index_t count = cuda::downloaded(exec, freed_.data() + blocks_, 1).front();
    return cuda::downloaded(exec, freed_.data(), count);
  }

  void compact(const cuda_exec& exec, index_t layer, const LayerPlan& plan) {
    Base::check_layer(layer);
    const cuda::DevicePlan device(exec, layer, plan, Base::at(layer), false, Base::error_word());
    const auto paged = [&](T* data, std::int64_t cols) {
      cuda::RowStore s = Base::store(data, cols);
      s.blocks = device_table(layer);
      s.table_stride = stride_;
      s.block_rows = block_rows_;
      return s;
    };
    const cuda::RowStore k = paged(keys_.data(), shape_.head_dim_k), v = paged(values_.data(), shape_.head_dim_v);
    cuda::RowStore p = Base::store(positions_.data() + shape_.at(layer, 0) * stride_ * block_rows_, 1);
    p.area_rows = std::int64_t{stride_} * block_rows_;
    const cuda::MoveRows parts[] = {{k, k}, {v, v}, {p, p}};
    cuda::compact_rows(exec, device.keep(), shape_.kv_heads, parts);
    cuda::free_blocks(exec, device.keep(), shape_.kv_heads, k, freed_.data(), freed_.data() + blocks_);
    Base::set_lengths(exec, layer, device, nullptr);
  }

  // The whole pool, blocks that are free included: the engine owns it.
  std::size_t bytes_reserved() const noexcept { return keys_.bytes() + values_.bytes(); }
  // What `rows` [layers * kv_heads] take here: whole blocks.
  static std::size_t bytes_for(const CacheShape& shape, std::span<const std::int64_t> rows,
                               index_t block_rows = default_block_rows) {
    std::int64_t sum = 0;
    for (const std::int64_t r : rows) sum += cuda::round_up<std::int64_t>(r, block_rows);
    return static_cast<std::size_t>(sum) * Base::row_bytes(shape);
  }

 private:
  Rows<const T> rows(index_t layer, index_t head, const T* pool, index_t cols) const {
    Rows<const T> out = dense_rows<const T>(pool, Base::tokens(layer, head), cols);
    out.blocks = table_.data() + shape_.at(layer, head) * stride_;
    out.block_rows = block_rows_;
    out.block_stride = std::int64_t{block_rows_} * cols;
    return out;
  }

  index_t block_rows_;
  index_t stride_ = 0;
  std::int64_t blocks_ = 0;
  cuda::DeviceArray<T> keys_, values_;
  cuda::DeviceArray<index_t> positions_, table_, freed_;
};

}  // namespace kvevict::inline KVEVICT_ABI
