// What a whole plan costs: 32 layers of 8 KV heads, group 4, d 128, budget 15 %, one thread. Every layer shows the same
// rows, which are far larger than the caches, so one layer's memory serves all.
//   plan/<policy>/<t>        scores, rows and selection        plan.scoring/<policy>/<t>   its scorer alone
//   end_to_end/<policy>/<t>  plan and compaction of a cache of 4 layers, the `full` row beside them, with bytes
#include <benchmark/benchmark.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/cases.hpp"
#include "kvevict/allocate/full.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/policy/adakv.hpp"
#include "kvevict/policy/keydiff.hpp"
#include "kvevict/policy/knorm.hpp"
#include "kvevict/policy/pyramidkv.hpp"
#include "kvevict/policy/snapkv.hpp"
#include "kvevict/policy/streamingllm.hpp"

namespace kvevict::bench {
namespace {

constexpr index_t heads = 8, group = 4, dim = 128, window = 32;
const Budget budget = Budget::retain(0.15);

// One layer's rows and queries, shown as `layers` layers. Is a KVCacheView.
class Layers {
 public:
  using element_type = float;
  using memory_space = host_space;

  Layers(index_t layers, index_t tokens) : shape_{layers, heads, heads * group, dim, dim}, tokens_(tokens) {
    std::uint32_t state = 1;
    const auto fill = [&](std::vector<float>& out, std::size_t n) {
      out.resize(n);
      for (float& x : out) {
        state = state * 1664525u + 1013904223u;
        x = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-30f;
      }
    };
    const auto t = static_cast<std::size_t>(tokens);
    fill(keys_, t * heads * dim);
    fill(values_, t * heads * dim);
    fill(queries_, static_cast<std::size_t>(window) * heads * group * dim);
    for (index_t i = 0; i < tokens; ++i) positions_.push_back(i);
    observations_ = observe_all(*this, 0.088f, [&](OwnedObservation<float>& layer) {
      for (index_t q = 0; q < heads * group; ++q)
        layer.window_queries.push_back(
            dense_rows<const float>(queries_.data() + std::ptrdiff_t{q} * window * dim, window, dim));
      layer.window_positions = std::span(positions_).last(window);
    });
  }
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  CacheShape shape() const { return shape_; }
  index_t tokens(index_t, index_t) const { return tokens_; }
  Rows<const float> keys(index_t, index_t head) const { return rows(keys_, head); }
  Rows<const float> values(index_t, index_t head) const { return rows(values_, head); }
  std::span<const index_t> positions(index_t, index_t) const { return positions_; }
  std::span<const LayerObservation<float>> observations() const { return observations_.layers(); }

 private:
  Rows<const float> rows(const std::vector<float>& data, index_t head) const {
    return dense_rows<const float>(data.data() + std::ptrdiff_t{head} * tokens_ * dim, tokens_, dim);
  }

  CacheShape shape_;
  index_t tokens_;
  std::vector<float> keys_, values_, queries_;
  std::vector<index_t> positions_;
  Observations<float> observations_;
};

template <class P>
void add_plan(const std::string& name, P policy, index_t tokens) {
  constexpr index_t layers = 32;
  const std::string size = '/' + name + '/' + std::to_string(tokens);
  add_case({"plan" + size,
            [=] {  // a short prompt is enough to see that the total is met
              const Layers run(2, 256);
              const auto plan = policy.plan(host_exec{}, run, run.observations(), budget);
              if (plan.rows_kept() > plan.granted.total) fail_domain("the plan keeps more than the budget");
            },
            [=](benchmark::State& state) {
              const Layers run(layers, tokens);
              for (auto _ : state) benchmark::DoNotOptimize(policy.plan(host_exec{}, run, run.observations(), budget));
            }});
  add_case({"plan.scoring" + size, {}, [=](benchmark::State& state) {
              const Layers run(layers, tokens);
              std::vector<float> scores(static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens));
              for (auto _ : state)
                for (const auto& o : run.observations()) {
                  score_on(host_exec{}, policy.scorer, o, Matrix<float>{scores.data(), heads, tokens, tokens});
                  benchmark::DoNotOptimize(scores.data());
                }
            }});
}

template <class P>
void add_end_to_end(const std::string& name, P policy, index_t tokens) {
  add_case({"end_to_end/" + name + '/' + std::to_string(tokens), {}, [=](benchmark::State& state) {
              const Layers run(4, tokens);
              std::size_t live = 0, reserved = 0;
              for (auto _ : state) {
                state.PauseTiming();
                RaggedCache<float> cache(run);
                state.ResumeTiming();
                apply(host_exec{}, policy.plan(host_exec{}, run, run.observations(), budget), cache);
                live = cache.bytes_live();
                reserved = cache.bytes_reserved();
              }
              state.counters["bytes_live"] = static_cast<double>(live);
              state.counters["bytes_reserved"] = static_cast<double>(reserved);
            }});
}

const bool added = [] {
  for (const index_t tokens : {1024, 4096, 16384, 32768}) {
    add_plan("snapkv", SnapKV{}, tokens);
    add_plan("pyramidkv", PyramidKV{}, tokens);
    add_plan("adakv", AdaKV{}, tokens);
    add_plan("knorm", KNorm{}, tokens);
    add_plan("keydiff", KeyDiff{}, tokens);
    add_plan("streamingllm", StreamingLLM{}, tokens);
  }
  for (const index_t tokens : {4096, 32768}) {
    add_end_to_end("full", Policy<allocate::Full, score::Position>{}, tokens);
    add_end_to_end("snapkv", SnapKV{}, tokens);
    add_end_to_end("adakv", AdaKV{}, tokens);
    add_end_to_end("knorm", KNorm{}, tokens);
    add_end_to_end("streamingllm", StreamingLLM{}, tokens);
  }
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
