// The observations of all layers of a cache, in one call: what a policy takes beside the cache itself.
#pragma once
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Owns the arrays of every layer and shows them as the span that policies take. May be moved and copied; what the rows
// show must outlive it, unless the layers keep it alive themselves, as those of a recording do.
template <class T>
class Observations {
 public:
  Observations() = default;
  explicit Observations(std::vector<OwnedObservation<T>> layers) : owned_(std::move(layers)) {
    views_.reserve(owned_.size());
    for (const auto& layer : owned_) views_.push_back(layer.observation());
  }
  Observations(const Observations& other) : Observations(other.owned_) {}
  Observations(Observations&&) noexcept = default;  // moving a vector leaves its elements where they are
  Observations& operator=(Observations other) noexcept {
    owned_.swap(other.owned_);
    views_.swap(other.views_);
    return *this;
  }
  ~Observations() = default;

  std::size_t size() const noexcept { return views_.size(); }  // layers
  const LayerObservation<T>& operator[](std::size_t layer) const& { return views_[layer]; }
  const LayerObservation<T>& operator[](std::size_t layer) const&& = delete;

  // One per layer. Deliberately no range: a std::span would take a temporary one.
  std::span<const LayerObservation<T>> layers() const& noexcept { return views_; }
  std::span<const LayerObservation<T>> layers() const&& = delete;
  operator std::span<const LayerObservation<T>>() const& noexcept { return views_; }
  operator std::span<const LayerObservation<T>>() const&& = delete;

 private:
  std::vector<OwnedObservation<T>> owned_;
  std::vector<LayerObservation<T>> views_;
};

// Every layer of any host cache; complete(layer), where it is given, sets in each what the cache cannot know: rope,
// window queries and their positions, further inputs. Throws as observe_layer does. O(layers * heads).
template <KVCacheView C, class Complete>
requires(C::memory_space::host)
    [[nodiscard]] Observations<typename C::element_type> observe_all(const C& cache, float softmax_scale,
                                                                     Complete&& complete) {
  std::vector<OwnedObservation<typename C::element_type>> layers;
  for (index_t l = 0; l < cache.shape().layers; ++l) {
    layers.push_back(observe_layer(cache, l, softmax_scale));
    complete(layers.back());
  }
  return Observations<typename C::element_type>(std::move(layers));
}
template <KVCacheView C>
requires(C::memory_space::host)
    [[nodiscard]] Observations<typename C::element_type> observe_all(const C& cache, float softmax_scale) {
  return observe_all(cache, softmax_scale, [](const auto&) {});
}
template <OwningCache C, class... Complete>
void observe_all(const C&& cache, float softmax_scale, Complete&&...) = delete;

}  // namespace kvevict::inline KVEVICT_ABI
