// The decoder against transformers: SmolLM2-135M-Instruct, float32 (tests/golden/model, made with the versions that the
// file's metadata names). Needs the folder that examples/models/smollm2.sh makes, in KVEVICT_MODEL_DIR.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/model/decoder.hpp"

using namespace kvevict;

namespace {

// Sum of |h| of the residual stream after every layer.
struct HiddenSums {
  std::vector<double>& sums;
  void hidden(index_t layer, index_t, Matrix<const float> rows) {
    for (index_t r = 0; r < rows.rows; ++r)
      for (index_t c = 0; c < rows.cols; ++c) sums[static_cast<std::size_t>(layer)] += std::abs(rows.at(r, c));
  }
};

double negative_log_likelihood(std::span<const float> logits, index_t token) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x - top));
  return top + std::log(sum) - static_cast<double>(logits[static_cast<std::size_t>(token)]);
}

}  // namespace

TEST_CASE("logits, likelihoods, hidden sizes and greedy continuations agree with transformers") {
  const Decoder d(KVEVICT_MODEL_DIR);
  const Safetensors golden(KVEVICT_TEST_DATA "/model/smollm2.safetensors");
  const host_exec exec{2};
  const index_t vocabulary = d.config().vocabulary;
  const auto v = static_cast<std::size_t>(vocabulary);
  for (const std::string prompt : {"short", "document", "long"}) {
    CAPTURE(prompt);
    const auto tokens = golden.at(prompt + ".tokens").as<std::int32_t>();
    const auto n = static_cast<index_t>(tokens.size());
    RaggedCache<float> cache(d.cache_shape());
    ForwardState state;
    std::vector<double> sums(30);
    d.feed(exec, tokens, cache, state, HiddenSums{sums});

    const auto positions = golden.at(prompt + ".logit_positions").as<std::int32_t>();
    const auto expected = golden.at(prompt + ".logits").as<float>();
    std::vector<float> logits(expected.size());
    d.logits(exec, state, positions, {logits.data(), static_cast<index_t>(positions.size()), vocabulary, vocabulary});
    float worst = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) worst = std::max(worst, std::abs(logits[i] - expected[i]));
    CHECK(worst < 2e-3f);

    const auto hidden = golden.at(prompt + ".hidden_mean_abs").as<float>();
    for (std::size_t l = 1; l + 1 < hidden.size(); ++l)
      CHECK(sums[l - 1] / (576. * n) == doctest::Approx(hidden[l]).epsilon(1e-4));

    const auto nll = golden.at(prompt + ".nll").as<float>();
    double worst_nll = 0;
    constexpr index_t step = 100;
    for (index_t first = 0; first < n - 1; first += step) {
      std::vector<index_t> rows;
      for (index_t r = first; r < std::min(n - 1, first + step); ++r) rows.push_back(r);
      std::vector<float> all(rows.size() * v);
      d.logits(exec, state, rows, {all.data(), static_cast<index_t>(rows.size()), vocabulary, vocabulary});
      for (const index_t r : rows) {
        const auto i = static_cast<std::size_t>(r);
        const double ours =
            negative_log_likelihood(std::span(all).subspan(static_cast<std::size_t>(r - first) * v, v), tokens[i + 1]);
        worst_nll = std::max(worst_nll, std::abs(ours - static_cast<double>(nll[i])));
      }
    }
    CHECK(worst_nll < 1e-3);

    std::vector<index_t> greedy;
    const auto continuation = golden.at(prompt + ".greedy").as<std::int32_t>();
    std::vector<float> next(v);
    for (index_t row = n - 1; greedy.size() < continuation.size(); row = 0) {
      d.logits(exec, state, {&row, 1}, {next.data(), 1, vocabulary, vocabulary});
      greedy.push_back(static_cast<index_t>(std::max_element(next.begin(), next.end()) - next.begin()));
      d.feed(exec, {&greedy.back(), 1}, cache, state);
    }
    CHECK(std::equal(greedy.begin(), greedy.end(), continuation.begin()));
  }
}
