// Policies on the device: a static allocator and Ada-KV, with scorers of every kind.
#include "kvevict/cuda/policy.cuh"

#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cuda/cache.cuh"
#include "kvevict/cuda/window_attention.cuh"

namespace kvevict {
static_assert(DeviceScorer<score::SnapKV, bf16_t> && DeviceScorer<score::KeyDiff, float>);

EvictionPlan plans(const cuda_exec& exec, const CudaRaggedCache<bf16_t>& cache,
                   std::span<const LayerObservation<bf16_t>> layers) {
  const Policy<allocate::Uniform, score::SnapKV> snapkv;
  const Policy<allocate::Ada<allocate::Pyramid>, score::KNorm> ada;
  (void)snapkv.plan(exec, cache, layers, Budget::retain(0.15));
  return ada.plan(exec, cache, layers, Budget::retain(0.15));
}

// One source for both backends.
template <class Exec, class Cache>
void evict(const Exec& exec, Cache& cache, std::span<const index_t> tokens,
           std::span<const LayerObservation<float>> layers) {
  const Policy<allocate::Uniform, score::SnapKV> policy;
  auto planner = policy.make_planner(exec, cache.shape(), tokens, Budget::retain(0.15));
  for (const auto& o : layers) cache.compact(exec, o.layer, planner.layer(exec, o));
}
template void evict(const cuda_exec&, CudaRaggedCache<float>&, std::span<const index_t>,
                    std::span<const LayerObservation<float>>);
template void evict(const host_exec&, RaggedCache<float>&, std::span<const index_t>,
                    std::span<const LayerObservation<float>>);
}  // namespace kvevict
