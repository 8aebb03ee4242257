// A dump ready for policies: its observations, one per layer.
#pragma once
#include <span>
#include <vector>

#include "kvevict/io/dump.hpp"

namespace kvevict::tool {

template <CacheElement T>
class ObservedDump {
 public:
  explicit ObservedDump(const Dump<T>& dump) : dump_(dump) {
    for (index_t l = 0; l < dump.info().shape.layers; ++l) layers_.push_back(observe_dump(dump, l));
    for (const auto& layer : layers_) observations_.push_back(layer.observation());
  }
  ObservedDump(const ObservedDump&) = delete;
  ObservedDump& operator=(const ObservedDump&) = delete;

  const Dump<T>& dump() const noexcept { return dump_; }
  const RecordedCache<T>& cache() const noexcept { return dump_.cache(); }
  std::span<const LayerObservation<T>> observations() const noexcept { return observations_; }

 private:
  Dump<T> dump_;
  std::vector<ObservedLayer<T>> layers_;
  std::vector<LayerObservation<T>> observations_;
};

}  // namespace kvevict::tool
