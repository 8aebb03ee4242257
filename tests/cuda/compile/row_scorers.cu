// The kernel of scorers of single rows.
#include "kvevict/cuda/row_scorers.cuh"

namespace kvevict {
template <class T>
void scores(const cuda_exec& exec, const LayerObservation<T>& o, Matrix<float> out) {
  score_on(exec, score::Random{}, o, out);
}
template void scores<float>(const cuda_exec&, const LayerObservation<float>&, Matrix<float>);
template void scores<fp16_t>(const cuda_exec&, const LayerObservation<fp16_t>&, Matrix<float>);
template void scores<bf16_t>(const cuda_exec&, const LayerObservation<bf16_t>&, Matrix<float>);
}  // namespace kvevict
