// pool/<implementation>/<tokens>: max pooling with kernel 7 of one row of scores, in place. Suffixes: avg5, avg7, max5.
//   kvevict     pool_row
//   std_window  a loop over the neighbours of each token
//   memcpy      the bound: the row copied once
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "common/cases.hpp"
#include "common/inputs.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/score/pooling.hpp"

namespace kvevict::bench {
namespace {

using Row = std::vector<float>;

Row std_window(const Pooling& p, const Row& row) {
  const auto n = static_cast<index_t>(row.size()), reach = p.kernel / 2;
  Row out(row.size());
  for (index_t j = 0; j < n; ++j) {
    float sum = 0, largest = -std::numeric_limits<float>::infinity();
    for (index_t i = std::max(0, j - reach); i <= std::min(n - 1, j + reach); ++i) {
      sum += row[static_cast<std::size_t>(i)];
      largest = std::max(largest, row[static_cast<std::size_t>(i)]);
    }
    out[static_cast<std::size_t>(j)] = p.kind == Pooling::Kind::max ? largest : sum / static_cast<float>(p.kernel);
  }
  return out;
}

void add_point(const std::string& operation, const Pooling& p, std::size_t tokens) {
  const std::string size = '/' + std::to_string(tokens);
  const auto bytes = [=](benchmark::State& state) {
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(tokens * sizeof(float)));
  };
  add_case({operation + "/kvevict" + size,
            [=] {
              Row row = make_scores(Scores::lognormal, tokens, 1), scratch(pool_scratch(p, tokens));
              const Row want = std_window(p, row);
              pool_row(p, row, scratch);
              for (std::size_t j = 0; j < tokens; ++j)
                if (!(std::abs(row[j] - want[j]) <= 1e-6f * want[j]))
                  fail_domain("token ", j, ": ", row[j], " for ", want[j]);
            },
            [=](benchmark::State& state) {
              Row row = make_scores(Scores::lognormal, tokens, 1), scratch(pool_scratch(p, tokens));
              for (auto _ : state) {
                pool_row(p, row, scratch);
                benchmark::ClobberMemory();
              }
              bytes(state);
            }});
  add_case({operation + "/std_window" + size, {}, [=](benchmark::State& state) {
              const Row row = make_scores(Scores::lognormal, tokens, 1);
              for (auto _ : state) benchmark::DoNotOptimize(std_window(p, row).data());
              bytes(state);
            }});
  add_case({operation + "/memcpy" + size, {}, [=](benchmark::State& state) {
              const Row row = make_scores(Scores::lognormal, tokens, 1);
              Row out(tokens);
              for (auto _ : state) {
                std::memcpy(out.data(), row.data(), tokens * sizeof(float));
                benchmark::ClobberMemory();
              }
              bytes(state);
            }});
}

const bool added = [] {
  for (const std::size_t tokens : {std::size_t{4096}, std::size_t{32768}}) add_point("pool", Pooling::max(7), tokens);
  add_point("pool.max5", Pooling::max(5), 32768);
  add_point("pool.avg5", Pooling::avg(5), 32768);
  add_point("pool.avg7", Pooling::avg(7), 32768);
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
