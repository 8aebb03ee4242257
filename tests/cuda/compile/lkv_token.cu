// Every kernel of lkv_token.cuh for float16, and for float32, which keys before RoPE take.
#include "kvevict/cuda/lkv_token.cuh"

template class kvevict::cuda::LayerTokenNets<kvevict::fp16_t>;
