// Golden parity of Expected Attention: query statistics are taken from the recorded queries before RoPE.
#include "kvevict/score/expected.hpp"
#include "kvevict/cpu/expected_attention.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "common/golden.hpp"
#include "kvevict/cpu/select_row.hpp"

using namespace kvevict;

namespace {

constexpr index_t first_row = 4;  // kvpress leaves its four sinks out of the statistics

struct Statistics {
  std::vector<float> mean, cov;  // [q_heads][d], [q_heads][d][d], divisor: number of rows
};

Statistics statistics(const golden::Set& set) {
  Statistics out;
  const auto d = static_cast<std::size_t>(set.shape.head_dim_k), t = static_cast<std::size_t>(set.tokens);
  const double rows = set.tokens - first_row;
  for (std::size_t h = 0; h < static_cast<std::size_t>(set.shape.q_heads); ++h) {
    const float* q = set.inputs.q_pre.data() + h * t * d;
    std::vector<double> mean(d, 0.0), cov(d * d, 0.0);
    for (std::size_t i = first_row; i < t; ++i)
      for (std::size_t c = 0; c < d; ++c) mean[c] += static_cast<double>(q[i * d + c]) / rows;
    for (std::size_t i = first_row; i < t; ++i)
      for (std::size_t a = 0; a < d; ++a)
        for (std::size_t b = 0; b < d; ++b)
          cov[a * d + b] +=
              (static_cast<double>(q[i * d + a]) - mean[a]) * (static_cast<double>(q[i * d + b]) - mean[b]) / rows;
    for (const double m : mean) out.mean.push_back(static_cast<float>(m));
    for (const double c : cov) out.cov.push_back(static_cast<float>(c));
  }
  return out;
}

}  // namespace

TEST_CASE("expected equals kvpress' ExpectedAttention, scores and kept sets, with every option") {
  for (const std::string name : {"synthetic-s01", "synthetic-s02", "smollm2-512-l00", "smollm2-512-l14"}) {
    CAPTURE(name);
    const golden::Set set = golden::load(name);
    const Statistics stats = statistics(set);
    auto layer = set.observe(1);
    const index_t d = set.shape.head_dim_k, heads = set.shape.kv_heads;
    layer.q_mean = {dense_rows(stats.mean.data(), set.shape.q_heads, d)};
    for (index_t h = 0; h < set.shape.q_heads; ++h)
      layer.q_cov.push_back(dense_rows(stats.cov.data() + std::ptrdiff_t{h} * d * d, d, d));
    layer.q_stats_first = first_row;

    score::Expected published;
    published.sinks = 4;
    published.protect = ProtectShare::score;
    for (const golden::Case* wanted : set.starting_with("expected_attention.")) {
      CAPTURE(wanted->id);
      score::Expected scorer = published;
      if (wanted->id.ends_with("eps1e-2")) scorer.epsilon = 1e-2f;
      if (wanted->id.ends_with("nocov")) scorer.covariance = false;
      if (wanted->id.ends_with("novnorm")) scorer.value_norm = false;
      std::vector<float> got(static_cast<std::size_t>(heads * set.tokens));
      const Matrix<float> matrix{got.data(), heads, set.tokens, set.tokens};
      score_on(host_exec{2}, scorer, layer.observation(), matrix);
      CHECK(golden::score_mismatch(matrix, wanted->score, [](index_t, index_t c) { return c < 4; }) == "");
      for (const auto& [tag, kept] : wanted->kept)
        CHECK(golden::kept_mismatch(
                  kept,
                  [&, &want = kept](std::size_t r) {
                    std::vector<index_t> out(static_cast<std::size_t>(want.counts[r]));
                    std::vector<std::byte> scratch(select_scratch_bytes(TopK{}, set.tokens));
                    select_row(TopK{}, {matrix.row(static_cast<index_t>(r)), static_cast<std::size_t>(set.tokens)},
                               want.counts[r], protect_asked(scorer.protection(), set.tokens), out, scratch);
                    return out;
                  },
                  wanted->score) == "");
    }
  }
}
