// token_mlp/<implementation>/<tokens>: LKV-T's scores of one head, d 128, 128 hidden units, float32, one thread.
// Suffixes: h32, h64 (hidden units), d64, f16, and unrotate for keys that are rotated back before RoPE. `eigen_tiled`
// is the same network as two matrix products per 512 tokens, `fma_floor` the time that its multiply-adds take at the
// processor's peak, measured by a loop of independent ones.
#include <benchmark/benchmark.h>

#include <Eigen/Core>
#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/cases.hpp"
#include "common/fma_loop.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/cpu/token_network.hpp"
#include "kvevict/lkv/lkv_t.hpp"

namespace kvevict::bench {
namespace {

template <class T>
struct Problem {
  index_t tokens, dim, hidden;
  std::vector<T> keys, values;
  std::vector<float> w1, b1, w2, inv_freq;
  std::vector<index_t> positions;
  OwnedObservation<T> observed;

  Problem(index_t t, index_t d, index_t h) : tokens(t), dim(d), hidden(h) {
    std::mt19937 random(1);
    std::normal_distribution<float> draw;
    for (index_t i = 0; i < t * d; ++i) {
      keys.push_back(from_float<T>(draw(random)));
      values.push_back(from_float<T>(draw(random)));
    }
    for (index_t i = 0; i < 2 * d * h; ++i) w1.push_back(0.1f * draw(random));
    for (index_t i = 0; i < h; ++i) {
      b1.push_back(draw(random));
      w2.push_back(draw(random));
    }
    for (index_t i = 0; i < d / 2; ++i)
      inv_freq.push_back(std::pow(10000.f, -2 * static_cast<float>(i) / static_cast<float>(d)));
    for (index_t i = 0; i < t; ++i) positions.push_back(i);
    observed.shape = {1, 1, 1, d, d};
    observed.rope = {RopeStyle::half, d, inv_freq, 1.f};
    observed.keys.push_back(dense_rows<const T>(keys.data(), t, d));
    observed.values.push_back(dense_rows<const T>(values.data(), t, d));
    observed.positions.emplace_back(positions);
  }
  void kvevict(TokenInput input, const host_exec& exec, std::vector<float>& out) const {
    const TokenNet<const float> net{2 * dim, hidden, w1.data(), b1.data(), w2.data()};
    token_scores(
        exec, observed.observation(), input, [&](index_t) { return net; },
        Matrix<float>{out.data(), 1, tokens, tokens});
  }
  // Two products per tile, then the activation: what one writes first.
  void eigen(std::vector<float>& out) const requires std::same_as<T, float> {
    using Block = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const Eigen::Map<const Block> k(keys.data(), tokens, dim), v(values.data(), tokens, dim),
        w(w1.data(), 2 * dim, hidden);
    Block z(512, hidden);
    for (index_t first = 0; first < tokens; first += 512) {
      const index_t n = std::min<index_t>(512, tokens - first);
      auto tile = z.topRows(n);
      tile.noalias() = k.middleRows(first, n) * w.topRows(dim);
      tile.noalias() += v.middleRows(first, n) * w.bottomRows(dim);
      tile.rowwise() += Eigen::Map<const Eigen::RowVectorXf>(b1.data(), hidden);
      tile.array() /= 1.f + (-tile.array()).exp();
      Eigen::Map<Eigen::VectorXf>(out.data() + first, n).noalias() =
          tile * Eigen::Map<const Eigen::VectorXf>(w2.data(), hidden);
    }
  }
};

template <class T>
void add_point(const std::string& suffix, index_t tokens, index_t dim, index_t hidden, TokenInput input = {}) {
  const std::string size = '/' + std::to_string(tokens);
  const double flops = 2.0 * tokens * (2.0 * dim * hidden + hidden);
  const auto count = [=](benchmark::State& state) {
    state.counters["FLOPS"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
  };
  const auto run = [=](benchmark::State& state) {
    const Problem<T> problem(tokens, dim, hidden);
    std::vector<float> out(static_cast<std::size_t>(tokens));
    Arena arena;
    const host_exec exec{1, &arena};
    for (auto _ : state) {
      problem.kvevict(input, exec, out);
      benchmark::ClobberMemory();
    }
    count(state);
  };
  std::function<void()> check;
  if constexpr (std::same_as<T, float>) {
    if (input == TokenInput{})
      check = [=] {
        const Problem<T> problem(tokens, dim, hidden);
        std::vector<float> fused(static_cast<std::size_t>(tokens)), tiled(fused);
        problem.kvevict(input, host_exec{1}, fused);
        problem.eigen(tiled);
        float largest = 0;
        for (const float v : tiled) largest = std::max(largest, std::abs(v));
        for (std::size_t i = 0; i < fused.size(); ++i)
          if (!(std::abs(fused[i] - tiled[i]) <= 1e-5f * largest))
            fail_domain("token ", i, ": ", fused[i], " and ", tiled[i]);
      };
    add_case({"token_mlp" + suffix + "/eigen_tiled" + size, {}, [=](benchmark::State& state) {
                const Problem<T> problem(tokens, dim, hidden);
                std::vector<float> out(static_cast<std::size_t>(tokens));
                for (auto _ : state) {
                  problem.eigen(out);
                  benchmark::ClobberMemory();
                }
                count(state);
              }});
  }
  add_case({"token_mlp" + suffix + "/kvevict" + size, check, run});
#if KVEVICT_SIMD
  add_case({"token_mlp" + suffix + "/fma_floor" + size, {}, [=](benchmark::State& state) {
              for (auto _ : state) benchmark::DoNotOptimize(fma_loop(flops));
              count(state);
            }});
#endif
}

const bool added = [] {
  constexpr index_t tokens = 32768;
  add_point<float>("", tokens, 128, 128);
  add_point<float>(".h64", tokens, 128, 64);
  add_point<float>(".h32", tokens, 128, 32);
  add_point<float>(".d64.h64", tokens, 64, 64);
  add_point<fp16_t>(".f16", tokens, 128, 128);
  add_point<bf16_t>(".bf16", tokens, 128, 128);
  add_point<fp16_t>(".f16.unrotate", tokens, 128, 128, {KeyFrame::pre_rope, TokenFeatures::distance});
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
