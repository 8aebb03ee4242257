// Policies on the device: a static allocator and Ada-KV, with scorers of every kind.
#include "kvevict/cuda/policy.cuh"

#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/cuda/cache.cuh"
#include "kvevict/cuda/window_attention.cuh"

namespace kvevict {
static_assert(DeviceScorer<WindowAttention, bf16_t> && DeviceScorer<KeyDiff, float>);

EvictionPlan plans(const cuda_exec& exec, const CudaRaggedCache<bf16_t>& cache,
                   std::span<const LayerObservation<bf16_t>> layers) {
  const Policy<Uniform, WindowAttention> snapkv;
  const Policy<Ada<Pyramid>, KeyNorm> ada;
  (void)plan_on(exec, snapkv, cache, layers, Budget::retain(0.15));
  return plan_on(exec, ada, cache, layers, Budget::retain(0.15));
}
}  // namespace kvevict
