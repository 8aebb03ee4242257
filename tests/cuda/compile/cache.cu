// The device caches are caches, and all of their kernels.
#include "kvevict/cuda/cache.cuh"

#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cuda/paged_cache.cuh"

namespace kvevict {
static_assert(KVCache<CudaRaggedCache<fp16_t>, cuda_exec> && KVCache<CudaDenseCache<bf16_t>, cuda_exec> &&
              KVCache<CudaPagedCache<float>, cuda_exec>);
static_assert(!KVCache<CudaRaggedCache<fp16_t>, host_exec>, "a device cache has no host compaction");

void compactions(const cuda_exec& exec, const RaggedCache<fp16_t>& host, const EvictionPlan& plan) {
  CudaRaggedCache<fp16_t> ragged(exec, host);
  CudaDenseCache<fp16_t> dense(exec, host);
  CudaPagedCache<fp16_t> paged(exec, host);
  apply(exec, plan, ragged);
  apply(exec, plan, dense);
  apply(exec, plan, paged);
  dense.shrink_to_fit(exec, 0);
  ragged.check(exec);
  (void)paged.freed_blocks(exec);
}
}  // namespace kvevict
