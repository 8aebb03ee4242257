// What plan(), layer() and RaggedCache() take as arrays: gathered once, then shown to the library as observations.
#pragma once
#include <optional>
#include <vector>

#include "arrays.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/rope/rope.hpp"
#include "objects.hpp"

namespace kvevict::inline KVEVICT_ABI::python {

// The arguments as they came; none where they were left out.
struct InputArguments {
  nb::object keys, values, queries, positions, query_positions, q_mean, q_cov;
  std::optional<float> softmax_scale;
  const PyRope* rope = nullptr;
  index_t q_stats_first = 0;
  std::string dtype;
};

struct Inputs {
  CacheShape shape;
  HeadTable keys;
  std::optional<HeadTable> values, queries, q_mean, q_cov;
  std::vector<std::vector<index_t>> positions;        // [layers * heads]
  std::vector<std::vector<index_t>> query_positions;  // [layers], or none
  float softmax_scale = 0.f;
  PyRope rope;
  index_t q_stats_first = 0;

  std::vector<index_t> tokens() const;  // [layers * heads]

  // The observation of layer `from` of these inputs as layer `as` of a cache of `of`.
  template <CacheElement T>
  OwnedObservation<T> layer(index_t from, index_t as, const CacheShape& of) const {
    OwnedObservation<T> out;
    out.shape = of;
    out.layer = as;
    out.softmax_scale = softmax_scale;
    if (!rope.inv_freq.empty()) out.rope = rope.view();
    for (index_t h = 0; h < keys.heads; ++h) {
      out.keys.push_back(keys.at(from, h).as<T>());
      if (values) out.values.push_back(values->at(from, h).as<T>());
      out.positions.push_back(positions[static_cast<std::size_t>(shape.at(from, h))]);
    }
    for (index_t h = 0; queries && h < queries->heads; ++h) out.window_queries.push_back(queries->at(from, h).as<T>());
    if (queries) out.window_positions = query_positions[static_cast<std::size_t>(from)];
    if (q_mean) out.q_mean.push_back(q_mean->at(0, from).as<float>());
    for (index_t h = 0; q_cov && h < q_cov->heads; ++h) out.q_cov.push_back(q_cov->at(from, h).as<float>());
    out.q_stats_first = q_stats_first;
    return out;
  }
};

// Throws ValueError or TypeError naming the argument. one_layer: arrays are those of a single layer, [heads]...
Inputs gather(const InputArguments& arguments, bool one_layer);

// The rows of inputs as a host cache, to copy from.
template <CacheElement T>
struct InputsView {
  using element_type = T;
  using memory_space = host_space;
  const Inputs& inputs;

  CacheShape shape() const { return inputs.shape; }
  index_t tokens(index_t l, index_t h) const { return static_cast<index_t>(inputs.keys.at(l, h).rows); }
  Rows<const T> keys(index_t l, index_t h) const { return inputs.keys.at(l, h).template as<T>(); }
  Rows<const T> values(index_t l, index_t h) const { return inputs.values->at(l, h).template as<T>(); }
  std::span<const index_t> positions(index_t l, index_t h) const {
    return inputs.positions[static_cast<std::size_t>(inputs.shape.at(l, h))];
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::python
