// Every kernel of select.cuh and split_rows.cuh.
#include "kvevict/cuda/select.cuh"

#include "kvevict/cuda/split_rows.cuh"

namespace kvevict {
void select_kernels(const cuda_exec& exec, const cuda::ScoredRows& rows, const cuda::SplitRows& split, index_t* budgets,
                    std::int64_t* offsets, unsigned long long* error) {
  cuda::log_softmax(exec, rows.scores, rows.row_stride, rows.tokens, rows.rows, const_cast<float*>(rows.scores));
  cuda::split_rows(exec, rows, 8, split, budgets, error);
  cuda::offsets(exec, rows.tokens, budgets, rows.rows, offsets);
  cuda::select(exec, rows, budgets, split.protections, offsets, budgets, error);
  cuda::kernels::launch_select(exec, cuda::SelectArgs<fp16_t>{}, 1, 1);
  cuda::kernels::launch_select(exec, cuda::SelectArgs<bf16_t>{}, 1, 1);
}
}  // namespace kvevict
