// Enough of the CUDA runtime to run the device code of this library on the host: memory is the host's, a stream is done
// at once, and a launch runs the kernel's blocks one after the other as fibres (cuda/host_cta.hpp). emulate_cuda.pl
// turns the launches of the headers into Launch.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "cuda/host_cta.hpp"

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = struct CudaStream*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
  cudaMemoryType type;
};

namespace kvevict_emulated {
// Device memory: first byte and size of what is allocated.
inline std::map<const char*, std::size_t> allocations;
inline void* dynamic_shared = nullptr;
inline kvevict::emulation::Block* running = nullptr;

// Launch(grid, threads, shared bytes, stream) = [&] { kernel(arguments); };
struct Launch {
  dim3 grid, block;
  std::size_t shared_bytes;
  Launch(dim3 g, dim3 b, std::size_t shared = 0, cudaStream_t = nullptr) : grid(g), block(b), shared_bytes(shared) {}
  template <class Kernel>
  void operator=(Kernel&& kernel) const {
    kvevict::emulation::Block fibres(static_cast<int>(block.x), shared_bytes, kvevict::emulation::Order::forward);
    running = &fibres;
    dynamic_shared = fibres.shared();
    blockDim = block;
    gridDim = grid;
    const std::function<void(int)> body = [&](int thread) {
      threadIdx.x = static_cast<unsigned>(thread);
      kernel();
    };
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = {x, y, z};
          std::memset(dynamic_shared, 0xcd, shared_bytes);
          fibres.run(body);
        }
    running = nullptr;
  }
};
}  // namespace kvevict_emulated

inline const char* cudaGetErrorName(cudaError_t) { return "error"; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// A small device, so that small caches are cut into parts.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : 96 * 1024;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
// Garbage, as a device gives it.
inline cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!*pointer) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xcd, bytes);
  kvevict_emulated::allocations[static_cast<const char*>(*pointer)] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  kvevict_emulated::allocations.erase(static_cast<const char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (bytes != 0) std::memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t) {
  for (std::size_t r = 0; r < height; ++r)
    std::memmove(static_cast<char*>(to) + r * to_pitch, static_cast<const char*>(from) + r * from_pitch, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  const auto& all = kvevict_emulated::allocations;
  const auto* p = static_cast<const char*>(pointer);
  auto after = all.upper_bound(p);
  out->type = cudaMemoryTypeUnregistered;
  if (after != all.begin() && p < (--after)->first + after->second) out->type = cudaMemoryTypeDevice;
  return cudaSuccess;
}
