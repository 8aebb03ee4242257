// Every kernel of select.cuh.
#include "kvevict/cuda/select.cuh"

namespace kvevict {
void select_kernels(const cuda_exec& exec, const cuda::ScoredRows& rows, index_t* budgets, std::int64_t* offsets,
                    unsigned long long* error) {
  cuda::uniform_budgets(exec, rows.tokens, rows.rows, -1, 200'000, true, budgets);
  cuda::ada_budgets(exec, rows, 8, offsets, {}, {}, budgets, error);
  cuda::offsets(exec, rows.tokens, budgets, rows.rows, offsets);
  cuda::select(exec, rows, budgets, {}, offsets, budgets, error);
  cuda::kernels::launch_select(exec, cuda::SelectArgs<fp16_t>{}, 1, 1);
  cuda::kernels::launch_select(exec, cuda::SelectArgs<bf16_t>{}, 1, 1);
}
}  // namespace kvevict
