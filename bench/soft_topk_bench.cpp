// soft_topk/<implementation>/<n>: the differentiable top-k of one row, 15 % of n scores, temperature 1, double, one
// thread. 256 scores are the heads of a model, the others the tokens of a head. Suffixes: tau0.1, tau0.001, f32, and
// backward for the gradient. `sort` is std::sort of the same array: the part that no exact threshold goes without here.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "common/cases.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/lkv/soft_topk.hpp"

namespace kvevict::bench {
namespace {

template <std::floating_point T>
std::vector<std::vector<T>> rows(std::size_t n) {
  std::vector<std::vector<T>> out(std::max<std::size_t>(1, std::min<std::size_t>(64, (1u << 18) / n)));
  std::mt19937 random(1);
  std::normal_distribution<double> draw(0, 2);
  for (auto& row : out)
    for (std::size_t i = 0; i < n; ++i) row.push_back(static_cast<T>(draw(random)));
  return out;
}

// step(row, number) once an iteration, rows in turn.
template <class T, class Step>
void turn(benchmark::State& state, const std::vector<std::vector<T>>& inputs, Step&& step) {
  std::size_t next = 0;
  for (auto _ : state) {
    step(inputs[next], next);
    benchmark::ClobberMemory();
    next = next + 1 == inputs.size() ? 0 : next + 1;
  }
}

template <std::floating_point T>
void add_point(const std::string& suffix, std::size_t n, double temperature) {
  const double k = 0.15 * static_cast<double>(n);
  const std::string size = '/' + std::to_string(n);
  for (const auto kind : {SoftThreshold::laplace, SoftThreshold::sigmoid}) {
    const auto run = [=](const std::vector<T>& row, std::vector<T>& mask, std::vector<double>& scratch) {
      return soft_topk<T>(row, k, temperature, mask, scratch, kind);
    };
    const std::string name = kind == SoftThreshold::laplace ? "/kvevict" : "/sigmoid";
    add_case({"soft_topk" + suffix + name + size,
              [=] {
                std::vector<T> mask(n);
                std::vector<double> scratch(soft_topk_scratch(n));
                for (const auto& row : rows<T>(n)) {
                  run(row, mask, scratch);
                  const double sum = std::accumulate(mask.begin(), mask.end(), 0.0);
                  if (!(std::abs(sum - k) <= (sizeof(T) == 8 ? 1e-9 : 1e-5) * k))
                    fail_domain("the mask sums to ", sum, ", not to ", k);
                }
              },
              [=](benchmark::State& state) {
                std::vector<T> mask(n);
                std::vector<double> scratch(soft_topk_scratch(n));
                turn(state, rows<T>(n), [&](const std::vector<T>& row, std::size_t) { run(row, mask, scratch); });
              }});
  }
  add_case({"soft_topk.backward" + suffix + "/kvevict" + size, {}, [=](benchmark::State& state) {
              const auto inputs = rows<T>(n);
              std::vector<T> mask(n), gradient(n);
              std::vector<double> scratch(soft_topk_scratch(n)), thresholds;
              for (const auto& row : inputs) thresholds.push_back(soft_topk<T>(row, k, temperature, mask, scratch));
              turn(state, inputs, [&](const std::vector<T>& row, std::size_t i) {
                benchmark::DoNotOptimize(soft_topk_backward<T>(row, thresholds[i], temperature, mask, gradient));
              });
            }});
  add_case({"soft_topk" + suffix + "/sort" + size, {}, [=](benchmark::State& state) {
              std::vector<T> copy(n);
              turn(state, rows<T>(n), [&](const std::vector<T>& row, std::size_t) {
                std::copy(row.begin(), row.end(), copy.begin());
                std::sort(copy.begin(), copy.end(), std::greater<>());
              });
            }});
}

const bool added = [] {
  for (const std::size_t n : {256, 4096, 32768}) {
    add_point<double>("", n, 1);
    add_point<double>(".tau0.1", n, 0.1);
    add_point<double>(".tau0.001", n, 0.001);
  }
  add_point<float>(".f32", 32768, 1);
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
