// Caches in device memory: ragged (a length per head, memory given back), dense (equal lengths, in place) and paged (a
// block table per head). They satisfy KVCache with cuda_exec; rows, positions and indices are device memory. Lengths
// are known on the device first: device_offsets() and device_tokens() never wait, tokens(), keys(), values(),
// positions() and bytes_live() wait for the last compaction where its plan was made on the device.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/compact.cuh"
#include "kvevict/cuda/detail/cache_base.cuh"
#include "kvevict/cuda/exec.cuh"

namespace kvevict::inline KVEVICT_ABI {

// Plans in device memory that do not fit are noticed on the device: check() throws then, and the rows are unspecified;
// nothing outside the cache is touched as long as offsets ascend. Plans in host memory are checked before anything
// changes.
template <CacheElement T>
class CudaCache {
 public:
  using element_type = T;
  using memory_space = cuda_space;

  CacheShape shape() const noexcept { return shape_; }
  index_t tokens(index_t layer, index_t head) const { return at(layer).host()[static_cast<std::size_t>(head)]; }
  // Lengths of a layer's heads, [kv_heads], in device memory, current in stream order.
  const index_t* device_tokens(index_t layer) const { return at(layer).device(); }
  std::size_t bytes_live() const {
    std::int64_t rows = 0;
    for (const auto& t : tokens_) rows = std::accumulate(t.host().begin(), t.host().end(), rows);
    return static_cast<std::size_t>(rows) * row_bytes(shape_);
  }
  // Waits. Throws std::invalid_argument where a plan from device memory did not fit.
  void check(const cuda_exec& exec) { error_.throw_if_set(exec, "cache", shape_.kv_heads); }

 protected:
  template <class View>
  CudaCache(const cuda_exec& exec, const View& view) : shape_(view.shape()), error_(exec) {
    check_shape(shape_);
    for (index_t l = 0; l < shape_.layers; ++l) {
      std::vector<index_t> tokens;
      for (index_t h = 0; h < shape_.kv_heads; ++h) tokens.push_back(view.tokens(l, h));
      tokens_.emplace_back(exec, std::move(tokens));
    }
  }
  void check_layer(index_t layer) const {
    if (layer < 0 || layer >= shape_.layers) fail_argument("cache: layer ", layer, " of ", shape_.layers);
  }
  cuda::LayerTokens& at(index_t layer) { return tokens_[static_cast<std::size_t>(layer)]; }
  const cuda::LayerTokens& at(index_t layer) const { return tokens_[static_cast<std::size_t>(layer)]; }
  // Lengths after a compaction; `first` may be null.
  void set_lengths(const cuda_exec& exec, index_t layer, const cuda::DevicePlan& plan, std::int64_t* first) {
    cuda::set_lengths(exec, plan.keep(), shape_.kv_heads, at(layer).device(), first);
    if (plan.on_host()) at(layer).changed(plan.kept());
    else at(layer).changed(exec);
  }
  static std::size_t row_bytes(const CacheShape& s) {
    return (static_cast<std::size_t>(s.head_dim_k) + static_cast<std::size_t>(s.head_dim_v)) * sizeof(T);
  }
  template <class E>
  static cuda::RowStore store(E* data, std::int64_t cols) {
    return {
        reinterpret_cast<unsigned char*>(data), cols * static_cast<std::int64_t>(sizeof(E)), 0, nullptr, nullptr, 0, 0};
  }
  unsigned long long* error_word() { return error_.word(); }

  CacheShape shape_;

 private:
  std::vector<cuda::LayerTokens> tokens_;
  cuda::ErrorFlag error_;
};

// A length per (layer, head); a layer's heads lie one after the other. Compaction moves the kept rows to new memory of
// their size and gives the old back in stream order, so for a moment a layer holds both.
template <CacheElement T>
class CudaRaggedCache : public CudaCache<T> {
  using Base = CudaCache<T>;
  using Base::shape_;

 public:
  // A copy of a host cache. Waits.
  template <KVCacheView V>
  requires(V::memory_space::host) CudaRaggedCache(const cuda_exec& exec, const V& view) : Base(exec, view) {
    for (index_t l = 0; l < shape_.layers; ++l) {
      std::vector<std::int64_t> first{0};
      for (index_t h = 0; h < shape_.kv_heads; ++h) first.push_back(first.back() + view.tokens(l, h));
      Layer layer(exec, shape_, first.back(), cuda::uploaded(exec, std::span<const std::int64_t>(first)));
      for (index_t h = 0; h < shape_.kv_heads; ++h) {
        const std::int64_t at = first[static_cast<std::size_t>(h)];
        cuda::copy_to_device(exec, view.keys(l, h), layer.keys.data() + at * shape_.head_dim_k);
        cuda::copy_to_device(exec, view.values(l, h), layer.values.data() + at * shape_.head_dim_v);
        const auto p = view.positions(l, h);
        cuda::copy_to_device(exec, dense_rows(p.data(), std::ssize(p), 1), layer.positions.data() + at);
      }
      layers_.push_back(std::move(layer));
    }
  }

  Rows<const T> keys(index_t layer, index_t head) const {
    return rows(layer, head, data(layer).keys.data(), shape_.head_dim_k);
  }
  Rows<const T> values(index_t layer, index_t head) const {
    return rows(layer, head, data(layer).values.data(), shape_.head_dim_v);
  }
  std::span<const index_t> positions(index_t layer, index_t head) const {
    const Rows<const index_t> p = rows(layer, head, data(layer).positions.data(), 1);
    return {p.data, static_cast<std::size_t>(p.rows)};
  }
  // Where each head's rows begin, [kv_heads + 1], in device memory, current in stream order; with the layer's arrays.
  const std::int64_t* device_offsets(index_t layer) const { return data(layer).first.data(); }
  const T* layer_keys(index_t layer) const { return data(layer).keys.data(); }
  const T* layer_values(index_t layer) const { return data(layer).values.data(); }
  const index_t* layer_positions(index_t layer) const { return data(layer).positions.data(); }

  void compact(const cuda_exec& exec, index_t layer, const LayerPlan& plan) {
    Base::check_layer(layer);
    Layer& old = layers_[static_cast<std::size_t>(layer)];
    const cuda::DevicePlan device(exec, layer, plan, Base::at(layer), false, Base::error_word());
    const std::int64_t rows = std::min(device.total(), old.keys.size() / shape_.head_dim_k);
    Layer now(exec, shape_, rows, cuda::DeviceArray<std::int64_t>(exec, shape_.kv_heads + 1));
    // Areas of the kept rows, before lengths are overwritten.
    cuda::set_lengths(exec, device.keep(), shape_.kv_heads, nullptr, now.first.data());
    const auto part = [&](auto* from, auto* to, std::int64_t cols) {
      cuda::MoveRows out{Base::store(from, cols), Base::store(to, cols)};
      out.from.first = old.first.data();
      out.to.first = now.first.data();
      return out;
    };
    const cuda::MoveRows parts[] = {part(old.keys.data(), now.keys.data(), shape_.head_dim_k),
                                    part(old.values.data(), now.values.data(), shape_.head_dim_v),
                                    part(old.positions.data(), now.positions.data(), 1)};
    cuda::gather_rows(exec, device.keep(), shape_.kv_heads, rows, parts);
    Base::set_lengths(exec, layer, device, nullptr);
    old.free_in(exec.stream);
    old = std::move(now);
  }

  std::size_t bytes_reserved() const noexcept {
    std::size_t bytes = 0;
    for (const Layer& l : layers_) bytes += l.keys.bytes() + l.values.bytes();
    return bytes;
  }
  // What `rows` [layers * kv_heads] take here: each row once.
  static std::size_t bytes_for(const CacheShape& shape, std::span<const std::int64_t> rows) {
    return static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0})) *
           Base::row_bytes(shape);
  }

 private:
  struct Layer {
    cuda::DeviceArray<T> keys, values;
    cuda::DeviceArray<index_t> positions;
    cuda::DeviceArray<std::int64_t> first;

    Layer(const cuda_exec& exec, const CacheShape& s, std::int64_t rows, cuda::DeviceArray<std::int64_t> areas)
        : keys(exec, rows * s.head_dim_k),
          values(exec, rows * s.head_dim_v),
          positions(exec, rows),
          first(std::move(areas)) {}
    // The memory goes back behind the work that reads it.
    void free_in(cudaStream_t stream) {
      keys.move_to(stream);
      values.move_to(stream);
      positions.move_to(stream);
      first.move_to(stream);
    }
  };
  const Layer& data(index_t layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  template <class E>
  Rows<const E> rows(index_t layer, index_t head, const E* all, index_t cols) const {
    const auto& tokens = Base::at(layer).host();
    const std::int64_t at = std::accumulate(tokens.begin(), tokens.begin() + head, std::int64_t{0});
    return dense_rows<const E>(all + at * cols, tokens[static_cast<std::size_t>(head)], cols);
  }

  std::vector<Layer> layers_;
};

// Heads of a layer are equally long: keys [kv_heads][head_stride][dim]. Compaction is in place; the memory behind the
// kept rows stays reserved until shrink_to_fit.
template <CacheElement T>
class CudaDenseCache : public CudaCache<T> {
  using Base = CudaCache<T>;
  using Base::shape_;

 public:
  // A copy of a host cache. Waits. Throws std::invalid_argument where heads of a layer differ.
  template <KVCacheView V>
  requires(V::memory_space::host) CudaDenseCache(const cuda_exec& exec, const V& view) : Base(exec, view) {
    for (index_t l = 0; l < shape_.layers; ++l) {
      const index_t tokens = view.tokens(l, 0);
      Layer layer(exec, shape_, tokens);
      for (index_t h = 0; h < shape_.kv_heads; ++h) {
        if (view.tokens(l, h) != tokens)
          fail_argument("CudaDenseCache: layer ", l, " holds ", tokens, " rows in head 0 and ", view.tokens(l, h),
                        " in head ", h, "; all heads of a layer are equally long here");
        const std::int64_t at = std::int64_t{h} * tokens;
        cuda::copy_to_device(exec, view.keys(l, h), layer.keys.data() + at * shape_.head_dim_k);
        cuda::copy_to_device(exec, view.values(l, h), layer.values.data() + at * shape_.head_dim_v);
        const auto p = view.positions(l, h);
        cuda::copy_to_device(exec, dense_rows(p.data(), std::ssize(p), 1), layer.positions.data() + at);
      }
      layers_.push_back(std::move(layer));
    }
  }

  // Never waits: a plan's size says how many rows each head keeps.
  index_t tokens(index_t layer, index_t = 0) const { return data(layer).tokens; }
  // Rows from the begin of one head to the begin of the next.
  std::int64_t head_stride(index_t layer) const { return data(layer).stride; }
  Rows<const T> keys(index_t layer, index_t head) const {
    const Layer& l = data(layer);
    return dense_rows<const T>(l.keys.data() + head * l.stride * shape_.head_dim_k, l.tokens, shape_.head_dim_k);
  }
  Rows<const T> values(index_t layer, index_t head) const {
    const Layer& l = data(layer);
    return dense_rows<const T>(l.values.data() + head * l.stride * shape_.head_dim_v, l.tokens, shape_.head_dim_v);
  }
  std::span<const index_t> positions(index_t layer, index_t head) const {
    const Layer& l = data(layer);
    return {l.positions.data() + head * l.stride, static_cast<std::size_t>(l.tokens)};
  }

  void compact(const cuda_exec& exec, index_t layer, const LayerPlan& plan) {
    Base::check_layer(layer);
    Layer& l = layers_[static_cast<std::size_t>(layer)];
    const cuda::DevicePlan device(exec, layer, plan, Base::at(layer), true, Base::error_word());
    if (device.total() % shape_.kv_heads != 0 ||
        (device.on_host() &&
         std::adjacent_find(device.kept().begin(), device.kept().end(), std::not_equal_to<>()) != device.kept().end()))
      fail_argument("CudaDenseCache: the plan of layer ", layer, " keeps ", device.total(), " rows in ",
                    shape_.kv_heads, " heads; all heads of a layer are equally long here (CudaRaggedCache takes any)");
    const auto part = [&](auto* data, std::int64_t cols) {
      cuda::MoveRows out{Base::store(data, cols), Base::store(data, cols)};
      out.from.area_rows = out.to.area_rows = l.stride;
      return out;
    };
    const cuda::MoveRows parts[] = {part(l.keys.data(), shape_.head_dim_k), part(l.values.data(), shape_.head_dim_v),
                                    part(l.positions.data(), 1)};
    cuda::compact_rows(exec, device.keep(), shape_.kv_heads, parts);
    Base::set_lengths(exec, layer, device, nullptr);
    l.tokens = static_cast<index_t>(std::min<std::int64_t>(l.tokens, device.total() / shape_.kv_heads));
  }

  // Moves a layer's rows to memory of their size and gives the rest back in stream order.
  void shrink_to_fit(const cuda_exec& exec, index_t layer) {
    Layer& l = layers_[static_cast<std::size_t>(layer)];
    if (l.stride == l.tokens) return;
    Layer now(exec, shape_, l.tokens);
    const auto copy = [&](auto& to, auto& from, std::int64_t cols) {
      const std::size_t row = static_cast<std::size_t>(cols) * sizeof(*from.data());
      const std::size_t pitch = static_cast<std::size_t>(l.stride) * row,
                        width = static_cast<std::size_t>(l.tokens) * row;
      if (width != 0)
        cuda::check(cudaMemcpy2DAsync(to.data(), width, from.data(), pitch, width,
                                      static_cast<std::size_t>(shape_.kv_heads), cudaMemcpyDeviceToDevice, exec.stream),
                    "shrink_to_fit");
      from.move_to(exec.stream);
    };
    copy(now.keys, l.keys, shape_.head_dim_k);
    copy(now.values, l.values, shape_.head_dim_v);
    copy(now.positions, l.positions, 1);
    l = std::move(now);
  }

  std::size_t bytes_live() const noexcept {
    std::int64_t rows = 0;
    for (const Layer& l : layers_) rows += std::int64_t{l.tokens} * shape_.kv_heads;
    return static_cast<std::size_t>(rows) * Base::row_bytes(shape_);
  }
  std::size_t bytes_reserved() const noexcept {
    std::size_t bytes = 0;
    for (const Layer& l : layers_) bytes += l.keys.bytes() + l.values.bytes();
    return bytes;
  }
  // What `rows` [layers * kv_heads] take here: every head of a layer is as long as its longest.
  static std::size_t bytes_for(const CacheShape& shape, std::span<const std::int64_t> rows) {
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    check_whole_layers(shape, rows.size());
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < rows.size(); i += heads)
      sum += *std::max_element(rows.begin() + static_cast<std::ptrdiff_t>(i),
                               rows.begin() + static_cast<std::ptrdiff_t>(i + heads)) *
             shape.kv_heads;
    return static_cast<std::size_t>(sum) * Base::row_bytes(shape);
  }

 private:
  struct Layer {
    cuda::DeviceArray<T> keys, values;
    cuda::DeviceArray<index_t> positions;
    std::int64_t stride;
    index_t tokens;

    Layer(const cuda_exec& exec, const CacheShape& s, index_t rows)
        : keys(exec, std::int64_t{rows} * s.kv_heads * s.head_dim_k),
          values(exec, std::int64_t{rows} * s.kv_heads * s.head_dim_v),
          positions(exec, std::int64_t{rows} * s.kv_heads),
          stride(rows),
          tokens(rows) {}
  };
  const Layer& data(index_t layer) const { return layers_[static_cast<std::size_t>(layer)]; }

  std::vector<Layer> layers_;
};

}  // namespace kvevict::inline KVEVICT_ABI
