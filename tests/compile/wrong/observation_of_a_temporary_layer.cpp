// error: deleted
#include "kvevict/cache/ragged.hpp"
#include "kvevict/observe/observation.hpp"

float scale(const kvevict::RaggedCache<float>& cache) {
#ifdef RIGHT
  const auto layer = kvevict::observe_layer(cache, 0, 1.f);
  const auto observation = layer.observation();
#else
  const auto observation = kvevict::observe_layer(cache, 0, 1.f).observation();
#endif
  return observation.softmax_scale;
}
