// Policies on the device: a static allocator and Ada-KV, with scorers of every kind.
#include "kvevict/policy/policy.hpp"

#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cuda/cache.cuh"
#include "kvevict/cuda/key_scorers.cuh"
#include "kvevict/cuda/planning.cuh"
#include "kvevict/cuda/window_attention.cuh"
#include "kvevict/score/expected.hpp"

namespace kvevict {
static_assert(DeviceScorer<score::SnapKV, bf16_t> && DeviceScorer<score::KeyDiff, float>);

EvictionPlan plans(const cuda_exec& exec, const CudaRaggedCache<bf16_t>& cache,
                   std::span<const LayerObservation<bf16_t>> layers) {
  const Policy<allocate::Uniform, score::SnapKV> snapkv;
  const Policy<allocate::Ada<allocate::Pyramid>, score::KNorm> ada;
  (void)snapkv.plan(exec, cache, layers, Budget::retain(0.15));
  return ada.plan(exec, cache, layers, Budget::retain(0.15), {.first = 64, .align = 16, .recent = 1});
}

// Finished scores need no scorer of the device.
EvictionPlan plan_scores(const cuda_exec& exec, const CacheShape& shape, std::span<const index_t> tokens,
                         std::span<const Matrix<const float>> scores) {
  auto planner = Policy<allocate::Ada<>, score::Expected>{}.make_planner(exec, shape, tokens, Budget::rows(64));
  for (const auto& s : scores) (void)planner.layer(exec, s);
  return planner.finish(exec);
}

// One source for both backends.
template <class Exec, class Cache>
void evict(const Exec& exec, Cache& cache, std::span<const index_t> tokens,
           std::span<const LayerObservation<float>> layers) {
  const Policy<allocate::Uniform, score::KNorm> policy;
  auto planner = policy.make_planner(exec, cache.shape(), tokens, Budget::retain(0.15));
  for (const auto& o : layers) cache.compact(exec, o.layer, planner.layer(exec, o));
}
template void evict(const cuda_exec&, CudaRaggedCache<float>&, std::span<const index_t>,
                    std::span<const LayerObservation<float>>);
template void evict(const host_exec&, RaggedCache<float>&, std::span<const index_t>,
                    std::span<const LayerObservation<float>>);
}  // namespace kvevict
