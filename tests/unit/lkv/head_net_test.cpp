// LKV-H's network: scores by hand, ratios that sum to the budget, and gradients through Soft-TopK to every weight.
#include "kvevict/lkv/head_net.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

using namespace kvevict;

namespace {

struct Example {
  index_t heads = 6, width = 3, hidden = 4;
  std::vector<double> weights;

  explicit Example(bool direct = false) {
    if (direct) width = hidden = 0;
    std::mt19937 random(3);
    std::normal_distribution<double> draw;
    const index_t count = direct ? heads : heads * width + width * hidden + 2 * hidden;
    for (index_t i = 0; i < count; ++i) weights.push_back(draw(random));
  }
  template <class T>
  HeadNet<T> over(T* data) const {
    T* const w1 = data + heads * width;
    return {heads, width, hidden, data, w1, w1 + width * hidden, w1 + width * hidden + hidden};
  }
  std::vector<double> scores() const {
    std::vector<double> s(static_cast<std::size_t>(heads));
    head_scores(over(weights.data()), s);
    return s;
  }
};

}  // namespace

TEST_CASE("a head's score by hand") {
  // Embedding 2, W1 = (1, -1), b1 = (0, 1): hidden 2 and -1; score = 10 silu(2) + 1 silu(-1).
  const float weights[] = {2, 1, -1, 0, 1, 10, 1};
  double score = 0;
  head_scores(HeadNet<const float>{1, 1, 2, weights, weights + 1, weights + 3, weights + 5}, {&score, 1});
  CHECK(score == doctest::Approx(10 * 2 / (1 + std::exp(-2.0)) - 1 / (1 + std::exp(1.0))));
}

TEST_CASE("ratios sum to retain x heads, stay below one, and never shrink when the budget grows") {
  const auto scores = Example().scores();
  std::vector<double> before(6, 0.0), ratios(6);
  for (const double retain : {0.05, 0.15, 0.3, 0.5, 0.9}) {
    head_ratios(scores, retain, ratios);
    CHECK(std::accumulate(ratios.begin(), ratios.end(), 0.0) == doctest::Approx(6 * retain).epsilon(1e-12));
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(ratios[i] < 1);
      CHECK(ratios[i] > before[i]);
    }
    before = ratios;
  }
}

TEST_CASE("direct logits are the scores themselves") {
  const Example x(true);
  CHECK(x.scores() == x.weights);
}

TEST_CASE("a slope counts the doublings of the context beyond 512 tokens") {
  const std::vector<float> slopes{0.5f, -1, 2};
  const std::vector<index_t> tokens{512, 2048, 256};
  std::vector<double> scores{1, 1, 1};
  add_length_scores<float>(slopes, tokens, scores);
  CHECK(scores == std::vector<double>{1, -1, -1});
  add_length_scores<float>({}, tokens, scores);
  CHECK(scores == std::vector<double>{1, -1, -1});
  std::vector<double> grads{10, 10, 10};
  length_scores_backward<double>(std::vector<double>{3, 4, 5}, tokens, grads);
  CHECK(grads == std::vector<double>{10, 18, 5});
}

TEST_CASE("T4: gradients of every weight through the ratios agree with finite differences, relative 1e-6") {
  for (const bool direct : {false, true}) {
    Example x(direct);
    const std::vector<double> g{0.3, -1.2, 0.7, 2.0, -0.4, 0.1};
    const auto loss = [&] {
      std::vector<double> ratios(6);
      head_ratios(x.scores(), 0.3, ratios);
      return std::inner_product(g.begin(), g.end(), ratios.begin(), 0.0);
    };
    std::vector<double> ratios(6), grad_scores(6), grads(x.weights.size(), 0.0);
    const auto scores = x.scores();
    const double threshold = head_ratios(scores, 0.3, ratios);
    head_ratios_backward(scores, threshold, g, grad_scores);
    head_scores_backward<double>(x.over<const double>(x.weights.data()), grad_scores, x.over(grads.data()));
    for (std::size_t i = 0; i < grads.size(); ++i) {
      const double h = 1e-4, keep = x.weights[i];
      const auto at = [&](double step) {
        x.weights[i] = keep + step;
        const double l = loss();
        x.weights[i] = keep;
        return l;
      };
      const double numeric = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      CHECK(grads[i] == doctest::Approx(numeric).epsilon(1e-6));
    }
  }
}
