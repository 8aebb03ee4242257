// What the device caches share: row counts that are known on the device first and on the host when asked for, and plans
// that lie on either side.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/compact.cuh"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/plan/check_plan.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// Whether a pointer is device memory (managed memory counts as such).
inline bool on_device(const void* pointer) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

// A host array on the device, waiting only where it is too large to travel with launches.
template <class T>
DeviceArray<T> copied(const cuda_exec& exec, std::span<const T> from) {
  if (from.size_bytes() <= 4 * static_cast<std::size_t>(kernels::UploadChunk::capacity)) return uploaded(exec, from);
  DeviceArray<T> out(exec, std::ssize(from));
  check(cudaMemcpyAsync(out.data(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice, exec.stream), "copy");
  wait(exec);
  return out;
}

// Copies rows of any host layout to dense device rows.
template <class T>
void copy_to_device(const cuda_exec& exec, const Rows<const T>& from, T* to) {
  std::vector<T> dense(static_cast<std::size_t>(from.rows) * static_cast<std::size_t>(from.cols));
  for (std::int64_t r = 0; r < from.rows; ++r)
    for (index_t c = 0; c < from.cols; ++c)
      dense[static_cast<std::size_t>(r) * static_cast<std::size_t>(from.cols) + static_cast<std::size_t>(c)] =
          from.at(r, c);
  if (dense.empty()) return;
  check(cudaMemcpyAsync(to, dense.data(), dense.size() * sizeof(T), cudaMemcpyHostToDevice, exec.stream), "copy");
  wait(exec);
}

// Row counts of one layer.
class LayerTokens {
 public:
  LayerTokens(const cuda_exec& exec, std::vector<index_t> tokens)
      : device_(uploaded(exec, std::span<const index_t>(tokens))), host_(std::move(tokens)) {}

  index_t* device() noexcept { return device_.data(); }
  const index_t* device() const noexcept { return device_.data(); }
  // The device knows better from here on, in this stream.
  void changed(const cuda_exec& exec) {
    stream_ = exec;
    known_ = false;
  }
  void changed(std::vector<index_t> tokens) {
    host_ = std::move(tokens);
    known_ = true;
  }
  // Waits for the last change where the counts are known on the device alone.
  const std::vector<index_t>& host() const {
    if (!known_) host_ = downloaded(stream_, device_.data(), device_.size());
    known_ = true;
    return host_;
  }
  std::size_t host_size() const noexcept { return static_cast<std::size_t>(device_.size()); }

 private:
  DeviceArray<index_t> device_;
  mutable std::vector<index_t> host_;
  mutable bool known_ = true;
  cuda_exec stream_;
};

// A LayerPlan as the kernels take it.
class DevicePlan {
 public:
  // Throws std::invalid_argument where a host plan does not fit, or where there are merges, which device caches cannot
  // carry out. Plans in host memory are checked and copied, which may wait; device plans are checked on the device.
  DevicePlan(const cuda_exec& exec, index_t layer, const LayerPlan& plan, const LayerTokens& tokens, bool equal_heads,
             unsigned long long* error)
      : heads_(static_cast<index_t>(plan.keep.offsets.size()) - 1) {
    if (!plan.merges.empty())
      fail_argument("plan of layer ", layer, ": ", plan.merges.size(), " merges; caches on the device only drop rows");
    on_host_ = !on_device(plan.keep.offsets.data());
    keep_.tokens = tokens.device();
    if (on_host_) {
      check_plan(layer, tokens.host(), plan);
      const std::int64_t first = plan.keep.offsets.front(), end = plan.keep.offsets.back();
      std::vector<std::int64_t> offsets(plan.keep.offsets.begin(), plan.keep.offsets.end());
      for (std::int64_t& o : offsets) o -= first;
      offsets_ = copied(exec, std::span<const std::int64_t>(offsets));
      rows_ =
          copied(exec, plan.keep.rows.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first)));
      kept_ = kept_rows(plan.keep);
      total_ = keep_.listed = end - first;
      keep_.offsets = offsets_.data();
      keep_.rows = rows_.data();
    } else {
      if (plan.keep.offsets.size() != tokens.host_size() + 1)
        fail_argument("plan of layer ", layer, ": ", plan.keep.offsets.size(), " offsets for ", tokens.host_size(),
                      " heads; ", tokens.host_size() + 1, " are needed");
      keep_.offsets = plan.keep.offsets.data();
      keep_.rows = plan.keep.rows.data();
      total_ = std::ssize(plan.keep.rows);
      keep_.listed = total_;
      check_plan_rows(exec, keep_, heads_, equal_heads, std::int64_t{layer} * heads_, error);
    }
  }

  const KeepRows& keep() const noexcept { return keep_; }
  bool on_host() const noexcept { return on_host_; }
  // Rows that each head keeps; of plans in host memory.
  const std::vector<index_t>& kept() const noexcept { return kept_; }
  // Rows that the layer keeps; of plans in device memory the size of keep.rows.
  std::int64_t total() const noexcept { return total_; }

 private:
  index_t heads_;
  bool on_host_ = false;
  KeepRows keep_{};
  DeviceArray<std::int64_t> offsets_;
  DeviceArray<index_t> rows_;
  std::vector<index_t> kept_;
  std::int64_t total_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI::cuda
