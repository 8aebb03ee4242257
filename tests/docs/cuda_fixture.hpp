// The names that CUDA blocks of the documents may use without declaring them. They are compiled, not run.
#pragma once
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/cuda/cache.cuh"
#include "kvevict/observe/observation.hpp"

struct Fixture {
  cudaStream_t stream = nullptr;
  kvevict::CacheShape shape{2, 2, 4, 64, 64};
  std::vector<kvevict::index_t> tokens = std::vector<kvevict::index_t>(4, 100);
  kvevict::cuda_exec device{nullptr};
  kvevict::RaggedCache<kvevict::fp16_t> host{shape};
  kvevict::CudaRaggedCache<kvevict::fp16_t> cache{device, host};
  kvevict::LayerObservation<kvevict::fp16_t> observation_of(int) { return {}; }
};
