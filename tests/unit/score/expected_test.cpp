#include "kvevict/score/expected.hpp"
#include "kvevict/cpu/expected_attention.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

using namespace kvevict;

static_assert(TokenScorer<score::Expected, float> && TokenScorer<score::Expected, bf16_t> &&
              heads_comparable(score::Expected{}));

namespace {

// One layer with random rows and statistics; `dim` is no multiple of a vector.
template <class T>
struct Layer {
  std::vector<float> inv_freq, mean;
  std::vector<std::vector<T>> keys, values;
  std::vector<std::vector<float>> cov;
  std::vector<std::vector<index_t>> positions;
  OwnedObservation<T> layer;
  Layer(std::vector<index_t> tokens, index_t group, index_t dim, index_t rotary, RopeStyle style = RopeStyle::half) {
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    const auto heads = static_cast<index_t>(tokens.size());
    layer.shape = {1, heads, heads * group, dim, dim + 1};
    layer.softmax_scale = 0.4f;
    for (index_t i = 0; i < rotary / 2; ++i)
      inv_freq.push_back(std::pow(100.f, -2.f * static_cast<float>(i) / static_cast<float>(rotary)));
    layer.rope = {style, rotary, inv_freq, 1.2f};
    for (const index_t t : tokens) {
      auto& k = keys.emplace_back();
      auto& v = values.emplace_back();
      auto& p = positions.emplace_back();
      for (index_t i = 0; i < t * dim; ++i) k.push_back(from_float<T>(normal(random)));
      for (index_t i = 0; i < t * (dim + 1); ++i) v.push_back(from_float<T>(normal(random)));
      for (index_t i = 0; i < t; ++i) p.push_back(2 * i);
    }
    for (std::size_t h = 0; h < tokens.size(); ++h) {
      layer.keys.push_back(dense_rows(static_cast<const T*>(keys[h].data()), tokens[h], dim));
      layer.values.push_back(dense_rows(static_cast<const T*>(values[h].data()), tokens[h], dim + 1));
      layer.positions.emplace_back(positions[h]);
    }
    for (index_t h = 0; h < heads * group; ++h) {
      std::vector<float> root;
      for (index_t i = 0; i < dim * dim; ++i) root.push_back(normal(random) * 0.5f);
      auto& c = cov.emplace_back(static_cast<std::size_t>(dim * dim), 0.f);
      for (index_t a = 0; a < dim; ++a)
        for (index_t b = 0; b < dim; ++b)
          for (index_t e = 0; e < dim; ++e)
            c[static_cast<std::size_t>(a * dim + b)] +=
                root[static_cast<std::size_t>(a * dim + e)] * root[static_cast<std::size_t>(b * dim + e)];
      for (index_t i = 0; i < dim; ++i) mean.push_back(normal(random));
    }
    layer.q_mean = {dense_rows(static_cast<const float*>(mean.data()), heads * group, dim)};
    for (const auto& c : cov) layer.q_cov.push_back(dense_rows(c.data(), dim, dim));
  }

  std::vector<float> scores(const score::Expected& scorer, int threads = 1) const {
    const auto o = layer.observation();
    const index_t width = o.most_tokens();
    std::vector<float> out(static_cast<std::size_t>(o.shape.kv_heads * width), -5.f);
    score_on(host_exec{threads}, scorer, o, Matrix<float>{out.data(), o.shape.kv_heads, width, width});
    return out;
  }

  // The formula in float64, with every rotation written out.
  std::vector<double> expected(const score::Expected& s, index_t head) const {
    const CacheShape& shape = layer.shape;
    const auto d = static_cast<std::size_t>(shape.head_dim_k), h = static_cast<std::size_t>(head);
    const auto t = positions[h].size(), first = std::min(static_cast<std::size_t>(s.sinks), t);
    std::vector<double> rotation(d * d, 0.0);
    for (std::size_t i = 0; i < d; ++i) rotation[i * d + i] = 1;
    for (index_t i = 0; i < layer.rope.rotary_dim / 2; ++i) {
      const bool half = layer.rope.style == RopeStyle::half;
      const auto a = static_cast<std::size_t>(half ? i : 2 * i),
                 b = static_cast<std::size_t>(half ? i + layer.rope.rotary_dim / 2 : 2 * i + 1);
      double c = 0, sn = 0;
      for (index_t p = positions[h].back() + 1; p <= positions[h].back() + s.future; ++p) {
        c += 1.2f * std::cos(p * static_cast<double>(inv_freq[static_cast<std::size_t>(i)])) / s.future;
        sn += 1.2f * std::sin(p * static_cast<double>(inv_freq[static_cast<std::size_t>(i)])) / s.future;
      }
      rotation[a * d + a] = rotation[b * d + b] = c;
      rotation[a * d + b] = -sn;
      rotation[b * d + a] = sn;
    }
    std::vector<double> out(t, 0.0);
    for (std::size_t g = 0; g < static_cast<std::size_t>(shape.group()); ++g) {
      const std::size_t q = h * static_cast<std::size_t>(shape.group()) + g;
      std::vector<double> z(t, 0.0);
      double sum = 0;
      for (std::size_t j = first; j < t; ++j) {
        std::vector<double> turned(d, 0.0);  // R^T k
        for (std::size_t a = 0; a < d; ++a)
          for (std::size_t b = 0; b < d; ++b)
            turned[a] += rotation[b * d + a] * static_cast<double>(to_float(keys[h][j * d + b]));
        for (std::size_t a = 0; a < d; ++a) {
          z[j] += 0.4f * turned[a] * static_cast<double>(mean[q * d + a]);
          if (s.covariance)
            for (std::size_t b = 0; b < d; ++b)
              z[j] += 0.5 * 0.4f * 0.4f * turned[a] * static_cast<double>(cov[q][a * d + b]) * turned[b];
        }
        sum += std::exp(z[j]);
      }
      for (std::size_t j = first; j < t; ++j) out[j] += std::exp(z[j]) / sum / shape.group();
    }
    if (s.value_norm)
      for (std::size_t j = first; j < t; ++j) {
        double norm = 0;
        for (std::size_t c = 0; c <= d; ++c)
          norm += std::pow(static_cast<double>(to_float(values[h][j * (d + 1) + c])), 2);
        out[j] = (out[j] + static_cast<double>(s.epsilon)) * std::sqrt(norm);
      }
    return out;
  }
};

}  // namespace

TEST_CASE("expected equals its formula in float64 for every option, both styles, partial rotation and ragged heads") {
  for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved}) {
    const Layer<float> l({70, 9}, 2, 18, 12, style);
    std::vector<score::Expected> options(7);
    options[1].covariance = false;
    options[2].value_norm = false;
    options[3].epsilon = 0.05f;
    options[4].sinks = 3;
    options[5].future = 1;
    options[6].sinks = 9;
    std::vector<std::vector<float>> all;
    for (const score::Expected& s : options) {
      const auto got = l.scores(s);
      for (index_t h = 0; h < 2; ++h) {
        const auto want = l.expected(s, h);
        for (std::size_t j = static_cast<std::size_t>(s.sinks); j < want.size(); ++j)
          CHECK(got[static_cast<std::size_t>(h * 70) + j] == doctest::Approx(want[j]).epsilon(1e-5));
        for (std::size_t j = 0; j < std::min(static_cast<std::size_t>(s.sinks), want.size()); ++j)
          CHECK(got[static_cast<std::size_t>(h * 70) + j] == -std::numeric_limits<float>::infinity());
      }
      CHECK(got[139] == -5.f);  // past the second head's tokens
      for (const auto& other : all) CHECK(got != other);
      all.push_back(got);
    }
  }
}

TEST_CASE("expected: protect=score raises the sinks above the layer's largest score") {
  const Layer<float> l({20, 20}, 1, 8, 8);
  score::Expected s;
  s.sinks = 4;
  const auto plain = l.scores(s);
  s.protect = ProtectShare::score;
  const auto raised = l.scores(s);
  const float largest = *std::max_element(plain.begin(), plain.end());
  for (std::size_t j = 0; j < 20; ++j) {
    CHECK(raised[j] == (j < 4 ? largest + 1 : plain[j]));
    CHECK(raised[20 + j] == (j < 4 ? largest + 1 : plain[20 + j]));
  }
  CHECK(s.protection().sinks == 4);
}

TEST_CASE("expected is the same for any thread count, and half precision is widened exactly") {
  const Layer<float> l({40, 33, 7}, 3, 16, 16);
  CHECK(l.scores(score::Expected{}, 3) == l.scores(score::Expected{}));
  const Layer<bf16_t> half({40}, 2, 16, 16);
  const auto got = half.scores(score::Expected{});
  const auto want = half.expected(score::Expected{}, 0);
  for (std::size_t j = 0; j < want.size(); ++j) CHECK(got[j] == doctest::Approx(want[j]).epsilon(1e-5));
}

TEST_CASE("expected: a head without rows and a head of one row are legal") {
  const Layer<float> l({0, 1, 5}, 1, 8, 8);
  const auto got = l.scores(score::Expected{});
  CHECK(got[0] == -5.f);
  CHECK(got[5] > 0);
}

TEST_CASE("expected says which input is missing or does not fit") {
  Layer<float> l({5}, 1, 8, 8);
  score::Expected s;
  s.future = 0;
  CHECK_THROWS_AS(l.scores(s), std::invalid_argument);
  l.layer.q_cov.clear();
  CHECK_THROWS_WITH_AS(l.scores(score::Expected{}),
                       "expected: layer 0 has no query statistics (q_mean, q_cov); this scorer needs it",
                       std::invalid_argument);
  Layer<float> narrow({5}, 1, 8, 8);
  narrow.layer.rope.rotary_dim = 6;
  CHECK_THROWS_AS(narrow.scores(score::Expected{}), std::invalid_argument);
}
