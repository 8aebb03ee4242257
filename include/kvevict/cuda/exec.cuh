// Where CUDA work runs: the execution object, device memory from a caller's allocator, small uploads that never wait,
// and the error word that kernels write and the caller reads when it synchronises.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/rules.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A CUDA call that failed: the runtime's words, and what was being done.
struct cuda_error : std::runtime_error {
  cudaError_t status;
  cuda_error(cudaError_t code, std::string_view what)
      : std::runtime_error(joined_text(what, ": ", cudaGetErrorName(code), " (", cudaGetErrorString(code), ')')),
        status(code) {}
};

// Device memory of the caller. take returns at least `bytes` bytes, 256-byte aligned, usable by work that is queued in
// `stream` afterwards; give gets them back behind all work queued there so far. `state` is handed through. Outlives
// what it gave memory to.
struct DeviceMemory {
  void* (*take)(void* state, std::size_t bytes, cudaStream_t stream) = nullptr;
  void (*give)(void* state, void* pointer, std::size_t bytes, cudaStream_t stream) = nullptr;
  void* state = nullptr;
};

// CUDA execution: work is queued in `stream`, on the current device, which must be the stream's. Calls return before
// the work is done unless they say that they wait. memory: null takes stream-ordered memory (cudaMallocAsync).
struct cuda_exec {
  cudaStream_t stream = nullptr;
  const DeviceMemory* memory = nullptr;
};

namespace cuda {

inline void check(cudaError_t status, std::string_view what) {
  if (status != cudaSuccess) throw cuda_error(status, what);
}
// After a kernel launch.
inline void check_launch(std::string_view what) { check(cudaGetLastError(), what); }

// Waits until everything queued in the stream is done.
inline void wait(const cuda_exec& exec) { check(cudaStreamSynchronize(exec.stream), "waiting for the stream"); }

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// An array in device memory, uninitialised. Given back in stream order.
template <class T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceArray() = default;
  DeviceArray(const cuda_exec& exec, std::int64_t count) : exec_(exec), count_(count) {
    if (count == 0) return;
    if (exec.memory) {
      data_ = static_cast<T*>(exec.memory->take(exec.memory->state, bytes(), exec.stream));
      if (!data_) throw cuda_error(cudaErrorMemoryAllocation, joined_text("device memory of ", bytes(), " bytes"));
    } else {
      void* pointer = nullptr;
      check(cudaMallocAsync(&pointer, bytes(), exec.stream), joined_text("device memory of ", bytes(), " bytes"));
      data_ = static_cast<T*>(pointer);
    }
  }
  DeviceArray(DeviceArray&& other) noexcept
      : exec_(other.exec_), data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(exec_, other.exec_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() {
    if (!data_) return;
    if (exec_.memory) exec_.memory->give(exec_.memory->state, data_, bytes(), exec_.stream);
    else cudaFreeAsync(data_, exec_.stream);
  }

  T* data() noexcept { return data_; }
  const T* data() const noexcept { return data_; }
  std::int64_t size() const noexcept { return count_; }
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count_) * sizeof(T); }
  std::span<T> span() noexcept { return {data_, static_cast<std::size_t>(count_)}; }
  std::span<const T> span() const noexcept { return {data_, static_cast<std::size_t>(count_)}; }
  // Later frees are queued there.
  void move_to(cudaStream_t stream) noexcept { exec_.stream = stream; }

 private:
  cuda_exec exec_;
  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

namespace kernels {
struct UploadChunk {
  static constexpr int capacity = 3072;
  alignas(16) unsigned char bytes[capacity];
};
template <class Chunk>
__global__ void upload_kernel(const __grid_constant__ Chunk chunk, unsigned char* to, int bytes) {
  for (int i = static_cast<int>(threadIdx.x); i < bytes; i += static_cast<int>(blockDim.x)) to[i] = chunk.bytes[i];
}
// Before a launch with this much dynamic shared memory.
template <class Kernel>
void allow_shared(Kernel* kernel, std::size_t bytes) {
  if (bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory of a kernel");
}

}  // namespace kernels

// Copies a small host array to the device without waiting: the bytes travel as kernel parameters, so `from` may change
// at once and the copy can be captured in a graph. Meant for what there is one of per head or layer.
template <class T>
void upload(const cuda_exec& exec, std::span<const T> from, T* to) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto* bytes = reinterpret_cast<const unsigned char*>(from.data());
  for (std::size_t done = 0; done < from.size_bytes();) {
    kernels::UploadChunk chunk;
    const std::size_t count = std::min<std::size_t>(from.size_bytes() - done, kernels::UploadChunk::capacity);
    std::memcpy(chunk.bytes, bytes + done, count);
    kernels::upload_kernel<<<1, 128, 0, exec.stream>>>(chunk, reinterpret_cast<unsigned char*>(to) + done,
                                                       static_cast<int>(count));
    check_launch("upload");
    done += count;
  }
}
template <class T>
DeviceArray<T> uploaded(const cuda_exec& exec, std::span<const T> from) {
  DeviceArray<T> out(exec, static_cast<std::int64_t>(from.size()));
  upload(exec, from, out.data());
  return out;
}

// Copies a device array to the host. Waits.
template <class T>
std::vector<T> downloaded(const cuda_exec& exec, const T* from, std::int64_t count) {
  std::vector<T> out(static_cast<std::size_t>(count));
  if (count == 0) return out;
  check(cudaMemcpyAsync(out.data(), from, out.size() * sizeof(T), cudaMemcpyDeviceToHost, exec.stream),
        "copy to the host");
  wait(exec);
  return out;
}

// The first fault of all kernels that were given word(). Row numbers are score rows: layer * heads + head.
class ErrorFlag {
 public:
  explicit ErrorFlag(const cuda_exec& exec) : word_(exec, 1) { clear(exec); }

  unsigned long long* word() noexcept { return word_.data(); }
  void clear(const cuda_exec& exec) {
    check(cudaMemsetAsync(word_.data(), 0xff, sizeof(unsigned long long), exec.stream), "ErrorFlag");
  }

  // Waits. Throws std::domain_error naming layer, head and token for a NaN score, std::invalid_argument for a plan that
  // no cache can carry out; the flag is clear afterwards.
  void throw_if_set(const cuda_exec& exec, std::string_view who, index_t heads) {
    const unsigned long long word = downloaded(exec, word_.data(), 1).front();
    if (word == no_error) return;
    clear(exec);
    const std::int64_t layer = row_of(word) / heads, head = row_of(word) % heads;
    if (fault_of(word) == Fault::nan_score)
      fail_domain(who, ": the score of layer ", layer, ", head ", head, ", token ", token_of(word), " is NaN");
    fail_argument(who, ": the plan of layer ", layer, ", head ", head, " does not fit, at entry ", token_of(word),
                  "; rows must ascend, be unique and exist");
  }

 private:
  DeviceArray<unsigned long long> word_;
};

}  // namespace cuda
}  // namespace kvevict::inline KVEVICT_ABI
