#include "kvevict/cpu/token_network.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "kvevict/core/splitmix64.hpp"

using namespace kvevict;

namespace {

constexpr index_t dim_k = 10, dim_v = 7, tokens = 120;

std::vector<float> noise(std::size_t n, std::uint64_t seed) {
  std::vector<float> out;
  for (std::size_t i = 0; i < n; ++i)
    out.push_back(static_cast<float>(detail::splitmix64(seed << 32 ^ i) >> 40) * 0x1p-23f - 1.f);
  return out;
}

// One head and its network.
struct World {
  index_t hidden;
  std::vector<float> keys = noise(tokens * dim_k, 1), values = noise(tokens * dim_v, 2),
                     w1 = noise(static_cast<std::size_t>((dim_k + dim_v) * hidden), 3),
                     b1 = noise(static_cast<std::size_t>(hidden), 4), w2 = noise(static_cast<std::size_t>(hidden), 5);

  float& element(index_t token, index_t i) {
    return i < dim_k ? keys[static_cast<std::size_t>(token * dim_k + i)]
                     : values[static_cast<std::size_t>(token * dim_v + i - dim_k)];
  }
  std::vector<float> scores(int threads = 1) const {
    const Rows<const float> k = dense_rows(keys.data(), tokens, dim_k), v = dense_rows(values.data(), tokens, dim_v);
    std::vector<index_t> places;
    for (index_t t = 0; t < tokens; ++t) places.push_back(t);
    const std::span<const index_t> positions = places;
    LayerObservation<float> o;
    o.shape = {1, 1, 1, dim_k, dim_v};
    o.keys = std::span(&k, 1);
    o.values = std::span(&v, 1);
    o.positions = std::span(&positions, 1);
    std::vector<float> out(tokens);
    const TokenNet<const float> net{dim_k + dim_v, hidden, w1.data(), b1.data(), w2.data()};
    token_scores(host_exec{threads}, o, TokenInput{}, [&](index_t) { return net; }, {out.data(), 1, tokens, tokens});
    return out;
  }
  // In double, and the sum of the magnitudes that the score is made of.
  double score(index_t token, double* magnitude) {
    double sum = 0;
    *magnitude = 0;
    for (index_t u = 0; u < hidden; ++u) {
      auto x = static_cast<double>(b1[static_cast<std::size_t>(u)]);
      for (index_t i = 0; i < dim_k + dim_v; ++i)
        x += static_cast<double>(element(token, i)) * static_cast<double>(w1[static_cast<std::size_t>(i * hidden + u)]);
      const double part = static_cast<double>(w2[static_cast<std::size_t>(u)]) * x / (1 + std::exp(-x));
      sum += part;
      *magnitude += std::abs(part);
    }
    return sum;
  }
};

}  // namespace

TEST_CASE("scores are the network's, whatever the number of hidden units and threads") {
  for (const index_t hidden : {1, 5, 16, 24, 40, 64}) {
    World w{hidden};
    const auto got = w.scores();
    double largest = 0, worst = 0, magnitude = 0;
    for (index_t t = 0; t < tokens; ++t) largest = std::max(largest, std::abs(w.score(t, &magnitude)));
    for (index_t t = 0; t < tokens; ++t)
      worst = std::max(worst, std::abs(static_cast<double>(got[static_cast<std::size_t>(t)]) - w.score(t, &magnitude)));
    CHECK(worst <= 1e-5 * largest);
    CHECK(w.scores(3) == got);
  }
}

TEST_CASE("A10: huge elements have finite scores, elements that are no number have NaN, in every build") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> finite{1e18f, -1e18f, 1e30f, -1e30f, 3e37f, -3e37f},
      broken{infinity, -infinity, std::numeric_limits<float>::quiet_NaN()};
  for (const index_t hidden : {5, 24, 64})  // units that fill their vectors and units that do not
    for (const index_t place : {0, 9, 10, 16}) {
      World w{hidden};
      const auto plain = w.scores();
      for (std::size_t i = 0; i < finite.size(); ++i) w.element(static_cast<index_t>(7 * i + 3), place) = finite[i];
      for (std::size_t i = 0; i < broken.size(); ++i) w.element(static_cast<index_t>(7 * i + 60), place) = broken[i];
      const auto got = w.scores();
      for (index_t t = 0; t < tokens; ++t) {
        const auto at = static_cast<std::size_t>(t);
        const bool huge = t < 45 && t % 7 == 3, nothing = t >= 60 && t < 81 && (t - 60) % 7 == 0;
        CHECK(std::isnan(got[at]) == nothing);
        if (huge) {
          double magnitude = 0;
          const double want = w.score(t, &magnitude);
          CHECK(std::abs(static_cast<double>(got[at]) - want) <= 1e-5 * magnitude);
        } else if (!nothing) {
          CHECK(got[at] == plain[at]);  // other rows notice nothing
        }
      }
    }
}
