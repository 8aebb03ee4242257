// Every kernel of token_network.cuh for float16, and for float32, which keys before RoPE take.
#include "kvevict/cuda/token_network.cuh"

template class kvevict::cuda::LayerTokenNets<kvevict::fp16_t>;
namespace kvevict {
template void score_on<fp16_t>(const cuda_exec&, const score::LkvT&, const LayerObservation<fp16_t>&, Matrix<float>);
}  // namespace kvevict
