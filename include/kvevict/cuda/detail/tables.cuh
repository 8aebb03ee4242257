// Small host arrays that one layer's kernels need (rows of every head, pointers to positions), sent to the device
// together, without waiting.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/tile.hpp"
#include "kvevict/cuda/exec.cuh"

namespace kvevict::inline KVEVICT_ABI::cuda {

class Tables {
 public:
  // Adds an array; at() finds it on the device after send().
  template <class T>
  std::size_t add(std::span<const T> array) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + (array.size_bytes() + 15) / 16 * 16);
    if (!array.empty()) std::memcpy(bytes_.data() + at, array.data(), array.size_bytes());
    return at;
  }
  void send(const cuda_exec& exec) {
    device_ = DeviceArray<unsigned char>(exec, static_cast<std::int64_t>(bytes_.size()));
    upload(exec, std::span<const unsigned char>(bytes_), device_.data());
  }
  template <class T>
  const T* at(std::size_t offset) const {
    return reinterpret_cast<const T*>(device_.data() + offset);
  }

 private:
  std::vector<unsigned char> bytes_;
  DeviceArray<unsigned char> device_;
};

namespace kernels {
template <class T>
__global__ void __launch_bounds__(256) pack_kernel(const __grid_constant__ Rows<const T> from, T* to) {
  DeviceCta cta;
  pack_rows(cta, from, to);
}
}  // namespace kernels

// The rows of several heads as the kernels load them: as they are where every 16 bytes of a row are one aligned load,
// else copies. The copies live as long as this.
template <class T>
class WholeRows {
 public:
  WholeRows(const cuda_exec& exec, std::span<const Rows<const T>> heads) : rows_(heads.begin(), heads.end()) {
    for (auto& rows : rows_) {
      if (rows_are_whole(rows) || rows.rows == 0) continue;
      const std::int64_t stride = packed_stride<T>(rows.cols), elements = rows.rows * stride;
      copies_.emplace_back(exec, elements);
      kernels::pack_kernel<T><<<static_cast<unsigned>(ceil_div<std::int64_t>(elements, 256)), 256, 0, exec.stream>>>(
          rows, copies_.back().data());
      check_launch("packing rows");
      const index_t cols = rows.cols;
      rows = dense_rows<const T>(copies_.back().data(), rows.rows, cols);
      rows.row_stride = stride;
    }
  }
  std::span<const Rows<const T>> rows() const { return rows_; }

 private:
  std::vector<Rows<const T>> rows_;
  std::vector<DeviceArray<T>> copies_;
};

namespace kernels {

// What a walk over tiles may use, and how it is cut: two blocks of 192 threads per processor, which leaves each thread
// the registers that fragments, products and their addresses take (128 are too few by a handful).
struct WalkShape {
  static constexpr int threads = 192, warps = threads / 32;
  int processors, shared_bytes;  // of one block

  WalkShape()
      : processors(device_attribute(cudaDevAttrMultiProcessorCount)),
        shared_bytes(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 - 1024) {}

  // Steps of a block, so that the grid fills the device about twice.
  int steps(std::int64_t tokens, std::int64_t heads, int tokens_per_step) const {
    const std::int64_t each = tokens * heads / (2 * std::int64_t{processors}) / tokens_per_step;
    return static_cast<int>(std::clamp<std::int64_t>(each, 1, 16));
  }
};

// Tokens of a warp in units of 8, such that the fragments of all blocks take no more than 64 registers; float32, which
// is split into two terms, gets less.
template <class T, int Blocks>
inline constexpr int tiles_for = std::is_same_v<T, float> ? (Blocks <= 2   ? 4
                                                             : Blocks == 4 ? 2
                                                                           : 1)
                                                          : (Blocks <= 4   ? 4
                                                             : Blocks == 8 ? 2
                                                                           : 1);

// Calls f with the number of 64-byte blocks that a kernel is made for, the next of 2, 4, 8 and 16.
template <class F>
void with_blocks(std::string_view who, int blocks, F&& f) {
  if (blocks <= 2) f(std::integral_constant<int, 2>{});
  else if (blocks <= 4) f(std::integral_constant<int, 4>{});
  else if (blocks <= 8) f(std::integral_constant<int, 8>{});
  else if (blocks <= 16) f(std::integral_constant<int, 16>{});
  else fail_argument(who, ": rows of ", blocks * block_bytes, " bytes; at most 1024 are possible on CUDA");
}

}  // namespace kernels
}  // namespace kvevict::inline KVEVICT_ABI::cuda
