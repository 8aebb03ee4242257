// Stands in for the library's cta.cuh: the block of a running kernel is the emulated one.
#pragma once
#include <cuda_runtime.h>

namespace kvevict::cuda {

struct DeviceCta : kvevict::emulation::HostCta {
  DeviceCta()
      : HostCta(*kvevict_emulated::running, static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
                static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)) {}
};

}  // namespace kvevict::cuda
