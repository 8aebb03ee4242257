// The oracle and slow path: compiled alone, since CUB's segmented sort is heavy.
#include "kvevict/cuda/detail/select_sort.cuh"

namespace kvevict {
void sort_kernels(const cuda_exec& exec, const cuda::ScoredRows& rows, index_t* budgets, std::int64_t* offsets,
                  unsigned long long* error) {
  cuda::select_by_sort(exec, rows, budgets, nullptr, offsets, budgets, error);
}
}  // namespace kvevict
