// Every kernel of window_attention.cuh for float16 and float32; bfloat16 differs in one instruction and is compiled by
// policy.cu.
#include "kvevict/cuda/window_attention.cuh"

namespace kvevict {
template void score_on<fp16_t>(const cuda_exec&, const score::SnapKV&, const LayerObservation<fp16_t>&, Matrix<float>);
template void score_on<float>(const cuda_exec&, const score::SnapKV&, const LayerObservation<float>&, Matrix<float>);
}  // namespace kvevict
