// A cache whose heads are equally long in each layer, so that a layer's keys are one tensor [head][token][dim], as
// engines without ragged attention want them. What does not fit that shape is an error, never padding.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/check_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Everything that is not said here is as in RaggedCache.
template <CacheElement T>
class DenseCache : private RaggedCache<T> {
  using Base = RaggedCache<T>;

 public:
  using element_type = T;
  using memory_space = host_space;

  using Base::append;
  using Base::bytes_live;
  using Base::bytes_reserved;
  using Base::keys;
  using Base::mutable_keys;
  using Base::mutable_positions;
  using Base::mutable_values;
  using Base::next_position;
  using Base::positions;
  using Base::renumbered;
  using Base::reserve;
  using Base::shape;
  using Base::shrink_to_fit;
  using Base::tokens;
  using Base::values;

  explicit DenseCache(const CacheShape& of) : Base(of) {}

  // A copy of any host cache of this element type. Throws std::invalid_argument, naming layer, heads and both lengths,
  // where heads of a layer differ.
  template <KVCacheView V>
  requires(V::memory_space::host&& std::same_as<typename V::element_type, T> &&
           !std::same_as<V, DenseCache>) explicit DenseCache(const V& view, const host_exec& exec = {})
      : Base(equal_lengths(view), exec) {}

  // Rows of each head of a layer.
  index_t tokens(index_t layer) const { return tokens(layer, 0); }
  // Rows from the begin of one head to the begin of the next, spare rows included.
  std::int64_t head_stride(index_t layer) const { return this->at(layer, 0).areas()[1]; }

  // Throws std::invalid_argument, and changes nothing, also where the plan keeps unequal numbers of rows.
  void compact(const host_exec& exec, index_t layer, const LayerPlan& plan) {
    check_layer("compact", shape(), layer);
    check_plan(layer, this->at(layer).tokens(), plan);
    const index_t first = static_cast<index_t>(plan.keep.head(0).size());
    for (index_t h = 1; h < shape().kv_heads; ++h)
      check_equal("plan", layer, first, h, static_cast<index_t>(plan.keep.head(h).size()));
    this->at(layer).compact(exec, plan);
  }

  // Throws std::invalid_argument, and changes nothing, also where heads would differ afterwards, as they do when some
  // have evicted more of the dropped rows than others.
  void truncate(index_t position) {
    for (index_t l = 0; l < shape().layers; ++l)
      for (index_t h = 1; h < shape().kv_heads; ++h)
        check_equal("truncate", l, rows_before(l, 0, position), h, rows_before(l, h, position));
    Base::truncate(position);
  }
  void trim(index_t tokens) {
    if (tokens < 0 || tokens > next_position())
      fail_argument("trim: ", tokens, " tokens; 0 to ", next_position(), " (the next position) are legal");
    truncate(next_position() - tokens);
  }

  // What `rows` [layers * kv_heads] take here: every head of a layer is as long as its longest. Throws
  // std::invalid_argument for rows of a part of a layer.
  static std::size_t bytes_for(const CacheShape& shape, std::span<const std::int64_t> rows) {
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    check_whole_layers(shape, rows.size());
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < rows.size(); i += heads) {
      const auto layer = rows.subspan(i, heads);
      sum += *std::max_element(layer.begin(), layer.end()) * shape.kv_heads;
    }
    return static_cast<std::size_t>(sum) * Base::row_bytes(shape);
  }

 private:
  static void check_equal(const char* what, index_t layer, index_t first, index_t head, index_t tokens) {
    if (tokens != first)
      fail_argument("DenseCache, ", what, ": layer ", layer, " would hold ", first, " rows in head 0 and ", tokens,
                    " in head ", head, "; all heads of a layer are equally long here (RaggedCache takes any length)");
  }
  template <class V>
  static const V& equal_lengths(const V& view) {
    const CacheShape s = view.shape();
    for (index_t l = 0; l < s.layers; ++l)
      for (index_t h = 1; h < s.kv_heads; ++h) check_equal("copy", l, view.tokens(l, 0), h, view.tokens(l, h));
    return view;
  }
  index_t rows_before(index_t layer, index_t head, index_t position) const {
    const auto p = positions(layer, head);
    return static_cast<index_t>(std::lower_bound(p.begin(), p.end(), position) - p.begin());
  }
};

static_assert(GrowingCache<DenseCache<float>, host_exec> && GrowingCache<DenseCache<fp16_t>, host_exec> &&
              GrowingCache<DenseCache<bf16_t>, host_exec>);

}  // namespace kvevict::inline KVEVICT_ABI
