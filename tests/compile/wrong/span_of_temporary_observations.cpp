// error: deleted
#include <span>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/observe/observations.hpp"

std::size_t layers(const kvevict::RaggedCache<float>& cache) {
#ifdef RIGHT
  const auto observations = kvevict::observe_all(cache, 1.f);
  const std::span<const kvevict::LayerObservation<float>> all = observations;
#else
  const std::span<const kvevict::LayerObservation<float>> all = kvevict::observe_all(cache, 1.f);
#endif
  return all.size();
}
