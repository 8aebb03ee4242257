// An engine with a GPU: the library's caches on the device, through the package alone. Runs without a device as well,
// where it only says so.
#include <cstdio>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/cuda/cache.cuh"

int main() {
  using namespace kvevict;
  static_assert(DeviceExec<cuda_exec> && !DeviceExec<host_exec>);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no device");
    return 0;
  }
  const CudaRaggedCache<float> cache(cuda_exec{}, RaggedCache<float>(CacheShape{1, 1, 1, 2, 2}));
  return cache.tokens(0, 0) == 0 ? 0 : 1;
}
