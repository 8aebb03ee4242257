// Soft-TopK: the solver in every branch, its properties, its gradients, and the tabulated values.
#include "kvevict/lkv/soft_topk.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvevict;

namespace {

struct Masked {
  std::vector<double> mask;
  double threshold;
};

Masked masked(const std::vector<double>& x, double k, double temperature = 1,
              SoftThreshold kind = SoftThreshold::laplace) {
  Masked out{std::vector<double>(x.size()), 0};
  std::vector<double> scratch(soft_topk_scratch(x.size()));
  out.threshold = soft_topk<double>(x, k, temperature, out.mask, scratch, kind);
  return out;
}

double sum(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

std::vector<double> normal(std::mt19937_64& random, std::size_t n, double scale) {
  std::normal_distribution<double> draw(0, scale);
  std::vector<double> x(n);
  for (auto& v : x) v = draw(random);
  return x;
}

void check_close(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - wanted[i]) <= tolerance);
}

}  // namespace

TEST_CASE("hand-computed thresholds and masks") {
  struct Case {
    std::vector<double> x;
    double k, threshold;
    std::vector<double> mask;
  };
  const Case cases[] = {
      {{2, 1, 0}, 1, 1.656630843759, {0.645311853733, 0.259297812067, 0.095390334200}},
      {{2, 1, 0}, 1.5, 1, {0.816060279414, 0.5, 0.183939720586}},
      {{2, 1, 0}, 2, 0.343369156241, {0.904609665800, 0.740702187933, 0.354688146267}},
      {{0, 0, 0, 0}, 1, 0.693147180560, {0.25, 0.25, 0.25, 0.25}},
      {{0, 0, 0, 0}, 3.5, -1.386294361120, {0.875, 0.875, 0.875, 0.875}},
      {{3, 0}, 1, 1.5, {0.888434919926, 0.111565080074}},
      {{1, 0}, 0.5, 1.313261687518, {0.365529289315, 0.134470710685}},
      {{10, 0, -10}, 2, -5.000022699450, {0.999999847052, 0.996631102973, 0.003369049974}},
      {std::vector<double>(256, 7.0), 38.4, 7 + 1.203972804326, std::vector<double>(256, 0.15)},
  };
  for (const auto& c : cases) {
    const auto got = masked(c.x, c.k);
    CHECK(got.threshold == doctest::Approx(c.threshold).epsilon(1e-11));
    check_close(got.mask, c.mask, 1e-11);
  }
}

TEST_CASE("thresholds, masks and gradients agree with the table") {
  std::ifstream file(std::string(KVEVICT_TEST_DATA) + "/lkv/soft_topk.txt");
  REQUIRE(file);
  std::string line;
  int cases = 0;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream head(line);
    std::size_t n = 0;
    double k = 0, temperature = 0, threshold = 0, grad_k = 0, grad_temperature = 0;
    REQUIRE(static_cast<bool>(head >> n >> k >> temperature >> threshold >> grad_k >> grad_temperature));
    std::vector<double> rows[4];
    for (auto& row : rows) {
      row.resize(n);
      for (auto& v : row) REQUIRE(static_cast<bool>(file >> v));
    }
    std::getline(file, line);
    const auto got = masked(rows[0], k, temperature);
    CHECK(got.threshold == doctest::Approx(threshold).epsilon(1e-11));
    check_close(got.mask, rows[1], 1e-9);
    std::vector<double> grad(n);
    const auto g = soft_topk_backward<double>(rows[0], got.threshold, temperature, rows[2], grad);
    check_close(grad, rows[3], 1e-7);
    CHECK(g.k == doctest::Approx(grad_k).epsilon(1e-9));
    CHECK(std::abs(g.temperature - grad_temperature) <= 1e-7 * std::max(1.0, std::abs(grad_temperature)));
    ++cases;
  }
  CHECK(cases == 12);
}

TEST_CASE("T1: the mask sums to k for every k, temperature and tie pattern") {
  std::mt19937_64 random(1);
  for (const auto kind : {SoftThreshold::laplace, SoftThreshold::sigmoid})
    for (const std::size_t n : {1u, 2u, 3u, 17u, 64u, 300u})
      for (const double temperature : {3.0, 1.0, 0.1, 0.01, 1e-3})
        for (const int form : {0, 1, 2, 3}) {
          auto x = normal(random, n, form == 1 ? 0.01 : 2.0);
          if (form == 2)
            for (auto& v : x) v = std::round(v);  // ties
          if (form == 3) std::fill(x.begin(), x.end(), 4.25);
          const auto top = static_cast<double>(n);
          for (const double k : {0.01, 0.3, 1.0, std::floor(top / 2), top / 3, top - 1, top - 0.3}) {
            if (k < soft_topk_margin || k > top - soft_topk_margin) continue;
            const auto got = masked(x, k, temperature, kind);
            INFO(n, " scores, k ", k, ", temperature ", temperature, ", form ", form);
            CHECK(std::abs(sum(got.mask) - k) < 1e-9);
            CHECK(std::all_of(got.mask.begin(), got.mask.end(), [](double m) { return m >= 0 && m <= 1; }));
          }
        }
}

TEST_CASE("T2: without a score above the threshold the mask is k times a softmax") {
  const std::vector<double> x{0.3, -0.2, 0.1, 0.25, -0.4, 0.0};
  double total = 0;
  for (const double v : x) total += std::exp(v);
  std::vector<double> wanted;
  for (const double v : x) wanted.push_back(1.5 * std::exp(v) / total);
  REQUIRE(*std::max_element(wanted.begin(), wanted.end()) < 0.5);
  check_close(masked(x, 1.5).mask, wanted, 1e-12);
  // A larger k saturates the largest entries below k * softmax.
  CHECK(masked(x, 4).mask[0] < 4 * std::exp(0.3) / total);
}

TEST_CASE("T3: translation invariant, order preserving, monotone in k, hard in the limit") {
  std::mt19937_64 random(3);
  const auto x = normal(random, 40, 1.0);
  auto moved = x;
  for (auto& v : moved) v += 123.5;
  check_close(masked(moved, 7.3, 0.5).mask, masked(x, 7.3, 0.5).mask, 1e-11);

  std::vector<double> before(x.size(), 0.0);
  for (double k = 0.5; k < 39.9; k += 1.7) {
    const auto now = masked(x, k).mask;
    for (std::size_t i = 0; i < x.size(); ++i) {
      CHECK(now[i] > before[i]);
      for (std::size_t j = 0; j < x.size(); ++j)
        if (x[i] > x[j]) CHECK(now[i] >= now[j]);
    }
    before = now;
  }

  auto sorted = x;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const auto hard = masked(x, 9, 1e-4).mask;
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(hard[i] == doctest::Approx(x[i] >= sorted[8] ? 1.0 : 0.0));
}

TEST_CASE("T4: gradients for scores, k and temperature agree with finite differences") {
  std::mt19937_64 random(4);
  for (const auto kind : {SoftThreshold::laplace, SoftThreshold::sigmoid})
    for (const double temperature : {1.0, 0.3})
      for (const double k : {0.4, 3.0, 4.6, 10.7}) {
        auto x = normal(random, 11, 1.0);
        const auto g = normal(random, 11, 1.0);
        const auto loss = [&](double at_k, double at_temperature) {
          const auto m = masked(x, at_k, at_temperature, kind).mask;
          return std::inner_product(m.begin(), m.end(), g.begin(), 0.0);
        };
        std::vector<double> grad(x.size());
        const auto got =
            soft_topk_backward<double>(x, masked(x, k, temperature, kind).threshold, temperature, g, grad, kind);
        const double h = 1e-5;
        CHECK(got.k == doctest::Approx((loss(k + h, temperature) - loss(k - h, temperature)) / (2 * h)).epsilon(1e-6));
        CHECK(got.temperature ==
              doctest::Approx((loss(k, temperature + h) - loss(k, temperature - h)) / (2 * h)).epsilon(1e-6));
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double keep = x[i];
          x[i] = keep + h;
          const double up = loss(k, temperature);
          x[i] = keep - h;
          const double down = loss(k, temperature);
          x[i] = keep;
          CHECK(std::abs(grad[i] - (up - down) / (2 * h)) < 1e-7);
        }
      }
}

TEST_CASE("gradients stay finite where every density underflows") {
  // One row above, one below, 4,000 temperatures away from each other: the threshold lies midway.
  const std::vector<double> x{4, 0};
  const auto got = masked(x, 1, 1e-3);
  std::vector<double> grad(2);
  const auto g = soft_topk_backward<double>(x, got.threshold, 1e-3, std::vector<double>{3, 5}, grad);
  CHECK(g.k == doctest::Approx(4));
  CHECK(grad == std::vector<double>{0, 0});
}

TEST_CASE("float rows agree with double rows, in place and for any number of threads") {
  std::mt19937_64 random(5);
  const auto wide = normal(random, 6 * 50, 1.0);
  std::vector<float> narrow(wide.begin(), wide.end()), mask(narrow.size()), again(narrow);
  const std::vector<double> k{0.2, 3, 7.5, 20, 31.25, 49.9};
  std::vector<double> thresholds(6), others(6);
  const Matrix<const float> scores{narrow.data(), 6, 50, 50};
  soft_topk_rows<float>(host_exec{1}, scores, k, 0.2, {mask.data(), 6, 50, 50}, thresholds);
  soft_topk_rows<float>(host_exec{3}, {again.data(), 6, 50, 50}, k, 0.2, {again.data(), 6, 50, 50}, others);
  CHECK(mask == again);
  CHECK(thresholds == others);
  for (std::size_t r = 0; r < 6; ++r) {
    const auto row = masked(
        {narrow.begin() + static_cast<long>(50 * r), narrow.begin() + static_cast<long>(50 * r + 50)}, k[r], 0.2);
    CHECK(thresholds[r] == row.threshold);
    for (std::size_t i = 0; i < 50; ++i) CHECK(mask[50 * r + i] == static_cast<float>(row.mask[i]));
  }
  std::vector<float> g(narrow.size(), 1.f), grad(narrow.size());
  std::vector<double> grad_k(6);
  soft_topk_rows_backward<float>(host_exec{2}, scores, thresholds, 0.2, {g.data(), 6, 50, 50}, {grad.data(), 6, 50, 50},
                                 grad_k);
  // A loss that counts the mask's sum: its derivative by k is 1, and no score can change it.
  for (const double v : grad_k) CHECK(v == doctest::Approx(1.0));
  for (const float v : grad) CHECK(std::abs(v) < 1e-6f);
}

TEST_CASE("k outside (0, n) is clamped; bad scores, temperatures and sizes are errors") {
  CHECK(sum(masked({1, 2, 3}, 0).mask) == doctest::Approx(1e-3));
  CHECK(sum(masked({1, 2, 3}, 3).mask) == doctest::Approx(3 - 1e-3));
  CHECK(masked({}, 1).mask.empty());
  CHECK_THROWS_AS(masked({1, std::nan("")}, 1), std::domain_error);
  CHECK_THROWS_AS(masked({1, std::numeric_limits<double>::infinity()}, 1), std::domain_error);
  CHECK_THROWS_AS(masked({1, 2}, 1, 0.0), std::invalid_argument);
  CHECK_THROWS_AS(masked({1, 2}, std::nan("")), std::invalid_argument);
  std::vector<double> mask(2), scratch(3);
  CHECK_THROWS_AS(soft_topk<double>(std::vector<double>{1, 2}, 1, 1, mask, scratch), std::invalid_argument);
}

TEST_CASE("the sigmoid threshold gives another mask than the Laplace threshold") {
  const auto laplace = masked({2, 1, 0}, 1).mask, sigmoid = masked({2, 1, 0}, 1, 1, SoftThreshold::sigmoid).mask;
  CHECK(std::abs(laplace[0] - sigmoid[0]) > 0.01);
  // By symmetry the threshold of k = n / 2 is the middle score.
  check_close(masked({2, 1, 0}, 1.5, 1, SoftThreshold::sigmoid).mask, {0.731058578630, 0.5, 0.268941421370}, 1e-11);
}
