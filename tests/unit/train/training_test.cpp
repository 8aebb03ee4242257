// The pieces of LKV's training that need no model: noise, schedules, optimiser, parameters, gradients of LKV-T.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "kvevict/train/adamw.hpp"
#include "kvevict/train/lkv_parameters.hpp"
#include "kvevict/train/noise.hpp"
#include "kvevict/train/schedule.hpp"
#include "kvevict/train/token_gradient.hpp"

using namespace kvevict;

TEST_CASE("noise depends on seed, stream and counter alone, and has the moments of its distribution") {
  const CounterRandom random(7, 3);
  CHECK(random.gumbel(5) == CounterRandom(7, 3).gumbel(5));
  CHECK(random.gumbel(5) != random.gumbel(6));
  CHECK(random.gumbel(5) != CounterRandom(8, 3).gumbel(5));
  CHECK(random.gumbel(5) != CounterRandom(7, 4).gumbel(5));
  double gumbel = 0, gumbel2 = 0, normal = 0, normal2 = 0;
  constexpr int n = 200000;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double g = random.gumbel(i), x = random.normal(i);
    gumbel += g, gumbel2 += g * g, normal += x, normal2 += x * x;
  }
  CHECK(gumbel / n == doctest::Approx(0.5772).epsilon(0.02));
  CHECK(gumbel2 / n - 0.5772 * 0.5772 == doctest::Approx(1.6449).epsilon(0.02));  // pi^2 / 6
  CHECK(std::abs(normal / n) < 0.01);
  CHECK(normal2 / n == doctest::Approx(1).epsilon(0.02));
  for (std::uint64_t i = 0; i < 1000; ++i) CHECK(random.below(i, 7) < 7);
}

TEST_CASE("temperature and retention follow the published schedule, the rate warms up and falls") {
  const ExponentialSchedule temperature{1, 0.001}, retain{0.5, 0.15};
  CHECK(temperature.at(0, 1000) == 1);
  CHECK(temperature.at(500, 1000) == doctest::Approx(std::sqrt(0.001)));
  CHECK(retain.at(300, 1000) == doctest::Approx(0.5 * std::pow(0.3, 0.3)));
  CHECK(retain.at(1000, 1000) == doctest::Approx(0.15));
  const LinearWarmUpSchedule rate{1e-3, 1e-4, 20};
  CHECK(rate.at(0, 1000) == doctest::Approx(1e-3 / 20));
  CHECK(rate.at(500, 1000) == doctest::Approx(5.5e-4));
  CHECK(rate.at(1000, 1000) == doctest::Approx(1e-4));
}

TEST_CASE("AdamW: two steps by hand, clipping, decay, and NaN refused") {
  AdamW<double> adam(2, {.clip = 0});
  std::vector<double> p{1, -2};
  adam.step(p, std::vector<double>{0.5, -4}, 0.1);
  // The first step moves every parameter by the rate against its sign.
  CHECK(p[0] == doctest::Approx(0.9));
  CHECK(p[1] == doctest::Approx(-1.9));
  adam.step(p, std::vector<double>{0, -4}, 0.1);
  // mean 0.045 / 0.19, square 0.00024975 / 0.001999.
  CHECK(p[0] == doctest::Approx(0.9 - 0.1 * (0.045 / 0.19) / std::sqrt(0.00024975 / 0.001999)));
  CHECK(p[1] == doctest::Approx(-1.8));

  AdamW<double> clipped(2, {.clip = 1});
  std::vector<double> q{0, 0};
  CHECK(clipped.step(q, std::vector<double>{3, 4}, 0.1) == doctest::Approx(5));
  CHECK(clipped.mean[0] == doctest::Approx(0.06));  // 0.1 * 3 / 5
  AdamW<double> decaying(1, {.weight_decay = 0.5});
  std::vector<double> r{2};
  decaying.step(r, std::vector<double>{0}, 0.1);
  CHECK(r[0] == doctest::Approx(1.9));
  CHECK_THROWS_AS(clipped.step(q, std::vector<double>{std::nan(""), 0}, 0.1), std::domain_error);
}

TEST_CASE("T4: gradients of LKV-T's weights agree with finite differences, relative 1e-6") {
  constexpr index_t tokens = 5, inputs = 4, hidden = 3;
  const CounterRandom random(2, 0);
  std::uint64_t counter = 0;
  std::vector<double> w(inputs * hidden + 2 * hidden), x(tokens * inputs), g(tokens), grads(w.size(), 0.0),
      scores(tokens);
  for (auto* v : {&w, &x, &g})
    for (auto& e : *v) e = random.normal(counter++);
  const auto over = [&]<class T>(T* p) {
    return TokenNet<T>{inputs, hidden, p, p + inputs * hidden, p + inputs * hidden + hidden};
  };
  const Matrix<const double> batch{x.data(), tokens, inputs, inputs};
  TokenNetState<double> state;
  const auto loss = [&] {
    token_net_forward<double>(over(static_cast<const double*>(w.data())), batch, state, scores);
    double s = 0;
    for (std::size_t i = 0; i < tokens; ++i) s += g[i] * scores[i];
    return s;
  };
  loss();
  token_net_backward<double>(over(static_cast<const double*>(w.data())), batch, state, g, over(grads.data()));
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double h = 1e-3, keep = w[i];
    const auto at = [&](double step) {
      w[i] = keep + step;
      const double l = loss();
      w[i] = keep;
      return l;
    };
    CHECK(grads[i] == doctest::Approx((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)).epsilon(1e-6));
  }
}

TEST_CASE("parameters: sizes of the published networks, first weights, and views that do not overlap") {
  // 256 heads of 128: 32,768 + 8,320 + 8,454,144 numbers.
  LkvSizes paper{32, 8, 128, 128, {}, 128, 64, 128};
  const LkvLayout layout(paper);
  CHECK(layout.head_size() == 32768 + 8320);
  CHECK(layout.token_size() == 33024);
  CHECK(layout.size() == 32768 + 8320 + 8454144);

  paper.head_length = true;
  const LkvLayout sloped(paper);
  CHECK(sloped.head_size() == layout.head_size() + 256);
  std::vector<float> all(sloped.size());
  CHECK(sloped.length_slopes(all.data()).data() == sloped.head_net(all.data()).w2 + 64);
  CHECK(sloped.token_net(all.data(), 0).w1 == sloped.length_slopes(all.data()).data() + 256);
  CHECK(layout.length_slopes(all.data()).empty());

  const LkvLayout small({2, 3, 4, 4, {}, 8, 4, 6});
  const auto p = initial_parameters<float>(small, 1);
  CHECK(p == initial_parameters<float>(small, 1));
  CHECK(p != initial_parameters<float>(small, 2));
  const auto last = small.token_net(p.data(), 5);
  CHECK(last.w2 + last.hidden == p.data() + p.size());
  std::vector<double> scores(6), ratios(6);
  head_scores(small.head_net(p.data()), scores);
  head_ratios(scores, 0.5, ratios);
  for (const double r : ratios) CHECK(std::abs(r - 0.5) < 0.2);
}

TEST_CASE("an exported network on raw rows gives the scores of the trained one on standardised rows") {
  const LkvLayout layout({1, 2, 3, 2, {KeyFrame::post_rope, TokenFeatures::distance}, 0, 0, 5});
  auto p = initial_parameters<float>(layout, 4);
  p[0] = 1.25f, p[1] = -3.5f;  // free logits
  const CounterRandom random(9, 0);
  std::vector<float> raw(2 * 6 * 7);
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = static_cast<float>(3 + 2 * random.normal(i));
  InputScaleEstimate estimate(layout.sizes());
  for (std::int64_t h = 0; h < 2; ++h) estimate.add(h, {raw.data() + 42 * h, 6, 7, 7});
  const InputScale scale = estimate.result();
  CHECK(scale.mean[5] == 0);  // features are left as they are
  CHECK(scale.inverse[6] == 1);
  const ExportedLkv e = export_tensors<float>(layout, p, scale);
  for (std::int64_t h = 0; h < 2; ++h) {
    std::vector<float> x(raw.begin() + 42 * h, raw.begin() + 42 * h + 42), trained(6), exported(6);
    TokenNetState<float> state;
    const TokenNet<const float> net{7, 5, e.token_w1.data() + 35 * h, e.token_b1.data() + 5 * h,
                                    e.token_w2.data() + 5 * h};
    token_net_forward<float>(net, {x.data(), 6, 7, 7}, state, exported);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(h) * 7 + i % 7;
      x[i] = (x[i] - scale.mean[at]) * scale.inverse[at];
    }
    token_net_forward<float>(layout.token_net(static_cast<const float*>(p.data()), h), {x.data(), 6, 7, 7}, state,
                             trained);
    for (std::size_t i = 0; i < 6; ++i) CHECK(exported[i] == doctest::Approx(trained[i]).epsilon(1e-4));
  }
  // Free logits survive as a network: the same ratios.
  std::vector<double> scores(2), ratios(2), direct(2);
  head_scores(HeadNet<const float>{2, 1, 1, e.embedding.data(), e.head_w1.data(), e.head_b1.data(), e.head_w2.data()},
              scores);
  head_ratios(scores, 0.4, ratios);
  head_ratios(std::vector<double>{1.25, -3.5}, 0.4, direct);
  CHECK(ratios[0] == doctest::Approx(direct[0]).epsilon(1e-9));
  CHECK(ratios[1] == doctest::Approx(direct[1]).epsilon(1e-9));
}
