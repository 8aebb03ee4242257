// Planning on the device: with this header a Policy makes planners and plans for a cuda_exec. layer() then returns a
// LayerPlan in device memory that a device cache compacts with; scores, rows per head and selections stay on the device
// and nothing waits before check(). Equal scores give the plans of the host, bit for bit.
//
// Scorers: those with a score_on(cuda_exec, ...) in a header that is included (window_attention.cuh, token_network.cuh,
// key_scorers.cuh, row_scorers.cuh), and finished scores. Allocators: static ones, computed on the host from the token
// counts, and layer allocators that say by data how a layer is split (Ada-KV, variants exact and kvpress). Selector:
// TopK.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/allocate/detail/row_tables.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/split_tables.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/cuda/select.cuh"
#include "kvevict/cuda/split_rows.cuh"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace cuda {

// What a planner asks of the device: memory for scores, rows of heads that share by score, selections, the error word.
// Its sibling is detail::HostPlanning.
class CudaPlanning {
 public:
  static constexpr bool host_forms = false;
  template <class K>
  static constexpr bool selects = std::same_as<K, TopK>;

  explicit CudaPlanning(const cuda_exec& exec) : error_(exec) {}

  void prepare(const cuda_exec& exec, const RowTables& t, bool) {
    tokens_ = uploaded(exec, std::span<const index_t>(t.tokens));
    protections_ = uploaded(exec, std::span<const HeadProtect>(t.protections));
    rows_ = uploaded(exec, std::span<const index_t>(t.rows));
    first_.assign(1, 0);
    bool softmax = false;
    SplitTables split;
    for (index_t l = 0; l < t.shape.layers; ++l) {
      const ScoreSplit& of_layer = t.splits[static_cast<std::size_t>(l)];
      first_.push_back(first_.back() + t.layer_rows[static_cast<std::size_t>(l)]);
      split.add(t.heads(l), of_layer);
      softmax |= of_layer.softmax;
    }
    if (softmax) evictable_ = uploaded(exec, std::span<const index_t>(t.evictable));
    split_ = DeviceSplit(exec, split);
    offsets_ = DeviceArray<std::int64_t>(exec, std::int64_t{t.shape.layers} * (t.shape.kv_heads + 1));
    indices_ = DeviceArray<index_t>(exec, first_.back());
  }

  // [kv_heads][longest of the layer], kept from layer to layer.
  Matrix<float> score_memory(const cuda_exec& exec, const RowTables& t, index_t layer) {
    const index_t width = t.longest(layer);
    return {memory(exec, scores_, t.shape.kv_heads, width), t.shape.kv_heads, width, width};
  }

  // Rows of the heads of a layer that share them; the host does not learn them before collect().
  void split(const cuda_exec& exec, const RowTables& t, index_t layer, Matrix<const float> scores) {
    const std::int64_t first = t.shape.at(layer, 0);
    ScoredRows rows = scored(t, layer, scores);
    if (t.splits[static_cast<std::size_t>(layer)].softmax) {
      // Heads that hold any row of the range have the same number of rows before it.
      index_t before = 0;
      for (const HeadProtect& p : layer_of(t.asked, t.shape, layer)) before = std::max(before, p.before);
      const std::int64_t pitch = rows.row_stride;
      float* normalised = memory(exec, normalised_, rows.rows, pitch);
      log_softmax(exec, rows.scores + before, pitch, evictable_.data() + first, rows.rows, normalised + before);
      rows.scores = normalised;
    }
    split_rows(exec, rows, t.shape.kv_heads, split_.from(layer, first), rows_.data() + first, error_.word());
  }

  LayerPlan select(const cuda_exec& exec, const RowTables& t, index_t layer, Matrix<const float> scores, const TopK&,
                   EvictionPlan&) {
    const std::int64_t first = t.shape.at(layer, 0);
    const index_t heads = t.shape.kv_heads;
    const ScoredRows rows = scored(t, layer, scores);
    std::int64_t* offsets_of_layer = offsets_.data() + std::int64_t{layer} * (heads + 1);
    index_t* out = indices_.data() + first_[static_cast<std::size_t>(layer)];
    offsets(exec, rows.tokens, rows_.data() + first, heads, offsets_of_layer);
    cuda::select(exec, rows, rows_.data() + first, protections_.data() + first, offsets_of_layer, out, error_.word());
    const std::int64_t kept = t.layer_rows[static_cast<std::size_t>(layer)];
    return {{{offsets_of_layer, static_cast<std::size_t>(heads) + 1}, {out, static_cast<std::size_t>(kept)}}, {}};
  }

  void check(const cuda_exec& exec, std::string_view policy, const CacheShape& shape) {
    error_.throw_if_set(exec, policy, shape.kv_heads);
  }

  // Plans in device memory stay. Waits.
  void collect(const cuda_exec& exec, RowTables& t, EvictionPlan& plan) {
    const auto offsets_of = downloaded(exec, offsets_.data(), offsets_.size());
    plan.indices = downloaded(exec, indices_.data(), indices_.size());
    const auto stride = static_cast<std::size_t>(t.shape.kv_heads) + 1;
    for (std::size_t i = 0; i < t.rows.size(); ++i) {
      const std::size_t layer = i / (stride - 1), at = layer * stride + i % (stride - 1);
      plan.offsets.push_back(first_[layer] + offsets_of[at + 1]);
      t.rows[i] = static_cast<index_t>(offsets_of[at + 1] - offsets_of[at]);
    }
  }

  template <class T>
  static std::string cause_of_nan(const LayerObservation<T>&, index_t) {
    return {};
  }

 private:
  ScoredRows scored(const RowTables& t, index_t layer, Matrix<const float> scores) const {
    const std::int64_t first = t.shape.at(layer, 0);
    return {scores.data, scores.row_stride, t.shape.kv_heads, tokens_.data() + first, t.longest(layer), first};
  }
  static float* memory(const cuda_exec& exec, DeviceArray<float>& array, index_t rows, std::int64_t width) {
    if (array.size() < rows * width) array = DeviceArray<float>(exec, rows * width);
    return array.data();
  }

  ErrorFlag error_;
  DeviceArray<index_t> tokens_, evictable_, rows_, indices_;
  DeviceArray<HeadProtect> protections_;
  DeviceArray<std::int64_t> offsets_;
  DeviceArray<float> scores_, normalised_;
  DeviceSplit split_;
  std::vector<std::int64_t> first_;  // [layers + 1]: where a layer's indices begin
};

}  // namespace cuda

// Scorers that run on the device for element type T.
template <class S, class T>
concept DeviceScorer = TokenScorer<S, T, cuda_exec>;

// Found by the planner from the execution object.
inline cuda::CudaPlanning planning_on(const cuda_exec& exec) { return cuda::CudaPlanning(exec); }

}  // namespace kvevict::inline KVEVICT_ABI
