// Every kernel of key_scorers.cuh.
#include "kvevict/cuda/key_scorers.cuh"

namespace kvevict {
template <class T>
void scores(const cuda_exec& exec, const LayerObservation<T>& o, Matrix<float> out) {
  score_on(exec, score::KNorm{}, o, out);
  score_on(exec, score::KeyDiff{}, o, out);
  score_on(exec, score::Position{}, o, out);
}
template void scores<float>(const cuda_exec&, const LayerObservation<float>&, Matrix<float>);
template void scores<fp16_t>(const cuda_exec&, const LayerObservation<fp16_t>&, Matrix<float>);
template void scores<bf16_t>(const cuda_exec&, const LayerObservation<bf16_t>&, Matrix<float>);
}  // namespace kvevict
