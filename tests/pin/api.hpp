// The only file of this folder that knows how the library is laid out and called. The digest tool is compiled against
// two commits and must be the same program for both, so whatever differs between them stands here.
#pragma once
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#if __has_include("kvevict/naming/registry.hpp")
#include "kvevict/cpu/simd.hpp"
#include "kvevict/naming/registry.hpp"
#include "kvevict/naming/standard_parts.hpp"
#include "kvevict/observe/observation.hpp"
#else
#include "kvevict/core/simd.hpp"
#include "kvevict/policy/registry.hpp"
#include "kvevict/policy/standard_parts.hpp"
#include "kvevict/score/observation.hpp"
#endif
#include "kvevict/io/dump.hpp"
#include "kvevict/policy/adakv.hpp"
#include "kvevict/policy/expected.hpp"
#include "kvevict/policy/keydiff.hpp"
#include "kvevict/policy/knorm.hpp"
#include "kvevict/policy/lkv.hpp"
#include "kvevict/policy/pyramidkv.hpp"
#include "kvevict/policy/snapkv.hpp"
#include "kvevict/policy/streamingllm.hpp"
#include "kvevict/select/block_topk.hpp"
#include "kvevict/select/score_threshold.hpp"
#if __has_include("kvevict/cpu/block_topk.hpp")
#include "kvevict/cpu/block_topk.hpp"
#include "kvevict/cpu/score_threshold.hpp"
#endif
#if defined(KVEVICT_PIN_CUDA)
#include "kvevict/cuda/cache.cuh"
#include "kvevict/cuda/window_attention.cuh"
#if __has_include("kvevict/cuda/planning.cuh")
#include "kvevict/cuda/planning.cuh"
#else
#include "kvevict/cuda/policy.cuh"
#endif
#if __has_include("kvevict/cuda/token_network.cuh")
#include "kvevict/cuda/key_scorers.cuh"
#include "kvevict/cuda/token_network.cuh"
#else
#include "kvevict/cuda/lkv_token.cuh"
#endif
#endif

namespace pin {

using kvevict::bf16_t;
using kvevict::Budget;
using kvevict::CacheShape;
using kvevict::fp16_t;
using kvevict::index_t;
using kvevict::LayerObservation;
using kvevict::Matrix;
using kvevict::Rows;

// What the tool asks of a plan.
struct Kept {
  std::int64_t granted = 0;
  std::vector<std::int64_t> offsets;
  std::vector<index_t> rows;
};

namespace api {

// Names that changed.
#if __has_include("kvevict/naming/registry.hpp")
namespace allocate = kvevict::allocate;
using KNorm = kvevict::KNorm;
using KeyDiff = kvevict::KeyDiff;
#else
namespace allocate = kvevict;
using KNorm = kvevict::Knorm;
using KeyDiff = kvevict::KeyDiffPolicy;
#endif

using Registry = kvevict::Registry;
using AnyPolicy = kvevict::AnyPolicy;

inline Registry registry(const std::string& learned, const std::string& paper) {
  kvevict::LkvDefaults files;
  files.checkpoint = learned;
  files.paper = paper;
  return kvevict::standard_registry(files);
}

// Every recorded layer, as the library reads it.
struct Recording {
  std::vector<LayerObservation<fp16_t>> layers;
  std::shared_ptr<const void> owner;  // of what the layers show
};
inline Recording read_recording(const std::filesystem::path& path) {
  const kvevict::Dump<fp16_t> dump(path);
  const auto read = [](const auto& from, index_t layer) {  // a template, so that the name not there is no error
    if constexpr (requires { observe_layer(from, layer); }) return observe_layer(from, layer);
    else return observe_dump(from, layer);
  };
  using Owned = decltype(read(dump, 0));
  auto owned = std::make_shared<std::vector<Owned>>();
  for (index_t l = 0; l < dump.info().shape.layers; ++l) owned->push_back(read(dump, l));
  Recording out;
  for (const Owned& layer : *owned) out.layers.push_back(layer.observation());
  out.owner = owned;
  return out;
}

template <class S>
auto needs(const S& scorer) {
  if constexpr (requires { needs_of(scorer); }) return needs_of(scorer);
  else return scorer.needs;
}

// Rows of the score matrix of this policy's scorer.
template <class P>
index_t score_rows(const P& policy, const CacheShape& shape) {
  return score_heads(policy.scorer, shape);
}
template <class P, class T>
void score(const P& policy, int threads, const LayerObservation<T>& observation, Matrix<float> out) {
  check_inputs("pin", needs(policy.scorer), policy.scorer.window_rows(), observation);
  const kvevict::host_exec exec{threads, nullptr};
  // Scoring was a member once.
  if constexpr (requires { score_on(exec, policy.scorer, observation, out); })
    score_on(exec, policy.scorer, observation, out);
  else policy.scorer.score(exec, observation, out);
}

template <class Granted>
std::int64_t total_of(const Granted& granted) {
  if constexpr (requires { granted.total; }) return granted.total;
  else return granted.rows;
}

inline Kept kept_of(kvevict::EvictionPlan plan) {
  return {total_of(plan.granted), std::move(plan.offsets), std::move(plan.indices)};
}

// All layers in one call.
template <class P, class View, class T>
Kept plan(const P& policy, int threads, const View& view, std::span<const LayerObservation<T>> observations,
          const Budget& budget) {
  return kept_of(policy.plan(kvevict::host_exec{threads, nullptr}, view, observations, budget));
}

// make_planner has had another name, and no options.
template <class P, class Exec>
auto planner_of(const P& policy, const Exec& exec, const CacheShape& shape, const std::vector<index_t>& tokens,
                const Budget& budget, std::int64_t row_bytes) {
#if __has_include("kvevict/plan/plan_options.hpp")
  kvevict::PlanOptions options;
  options.row_bytes = row_bytes;
  return policy.make_planner(exec, shape, tokens, budget, options);
#else
  if constexpr (requires { policy.make_planner(exec, shape, tokens, budget, row_bytes); })
    return policy.make_planner(exec, shape, tokens, budget, row_bytes);
  else return policy.begin(exec, shape, tokens, budget, row_bytes);
#endif
}

// The same through a planner that is given one layer after the other.
template <class P, class T>
Kept plan_by_layer(const P& policy, int threads, const CacheShape& shape, const std::vector<index_t>& tokens,
                   std::int64_t row_bytes, std::span<const LayerObservation<T>> observations, const Budget& budget) {
  const kvevict::host_exec exec{threads, nullptr};
  auto planner = planner_of(policy, exec, shape, tokens, budget, row_bytes);
  Kept out{total_of(planner.granted()), {0}, {}};
  for (const auto& o : observations) {
    const kvevict::LayerPlan layer = planner.layer(exec, o);
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      const auto head = layer.keep.head(h);
      out.rows.insert(out.rows.end(), head.begin(), head.end());
      out.offsets.push_back(static_cast<std::int64_t>(out.rows.size()));
    }
  }
  return out;
}

// f(name, policy) for what has a type of its own: the published combinations, and selectors that no text names.
template <class F>
void typed_policies(F&& f) {
  using kvevict::Policy, kvevict::BlockTopK, kvevict::ScoreThreshold;
  const kvevict::SnapKV snapkv;
  const kvevict::AdaKV adakv;
  const KNorm knorm;
  const KeyDiff keydiff;
  f("SnapKV", snapkv);
  f("snapkv_kvpress", kvevict::snapkv_kvpress());
  f("PyramidKV", kvevict::PyramidKV{});
  f("AdaKV", adakv);
  f("StreamingLLM", kvevict::StreamingLLM{});
  f("KNorm", knorm);
  f("KeyDiff", keydiff);
  f("ExpectedAttention", kvevict::ExpectedAttention{});
  f("SnapKV+BlockTopK(16)", Policy{snapkv.allocator, snapkv.scorer, BlockTopK{}});
  f("KNorm+BlockTopK(5)", Policy{knorm.allocator, knorm.scorer, BlockTopK{.block = 5}});
  f("AdaKV+BlockTopK(4)", Policy{adakv.allocator, adakv.scorer, BlockTopK{.block = 4}});
  f("KNorm+ScoreThreshold(-3)", Policy{knorm.allocator, knorm.scorer, ScoreThreshold{-3.f}});
  f("KeyDiff+ScoreThreshold(0)", Policy{keydiff.allocator, keydiff.scorer, ScoreThreshold{0.f}});
}

template <class F>
void typed_lkv(const std::string& checkpoint, F&& f) {
  f("lkv_from", kvevict::lkv_from(checkpoint));
}

#if defined(KVEVICT_PIN_CUDA)
template <class S, class T>
void score_on_device(const S& scorer, const LayerObservation<T>& observation, Matrix<float> out) {
  check_inputs("pin", needs(scorer), scorer.window_rows(), observation);
  score_on(kvevict::cuda_exec{}, scorer, observation, out);
}

template <class P, class View, class T>
Kept plan_on_device(const P& policy, const View& view, std::span<const LayerObservation<T>> observations,
                    const Budget& budget) {
  return kept_of(policy.plan(kvevict::cuda_exec{}, view, observations, budget));
}

// Compacts a device cache, layer by layer, with what a planner there says; returns the cache.
template <class P, class View, class T>
kvevict::CudaRaggedCache<T> compact_on_device(const P& policy, const View& host_view,
                                              const std::vector<index_t>& tokens, std::int64_t row_bytes,
                                              std::span<const LayerObservation<T>> observations, const Budget& budget) {
  const kvevict::cuda_exec exec;
  kvevict::CudaRaggedCache<T> cache(exec, host_view);
  auto planner = planner_of(policy, exec, cache.shape(), tokens, budget, row_bytes);
  for (const auto& o : observations) cache.compact(exec, o.layer, planner.layer(exec, o));
  planner.check(exec);
  cache.check(exec);
  return cache;
}
#endif

}  // namespace api
}  // namespace pin
