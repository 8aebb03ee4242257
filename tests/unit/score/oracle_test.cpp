#include "kvevict/score/oracle.hpp"
#include "kvevict/cpu/score_heads.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

using namespace kvevict;

static_assert(TokenScorer<score::Oracle, float> && heads_comparable(score::Oracle{}));

namespace {

// kv_heads of `tokens` keys and q_heads of `future` queries, [dim] each.
template <class T>
struct Recorded {
  std::vector<std::vector<T>> keys, queries;
  OwnedObservation<T> layer;
  Recorded(const std::vector<std::vector<float>>& k, const std::vector<std::vector<float>>& q, index_t dim,
           float scale) {
    layer.shape = {1, static_cast<index_t>(k.size()), static_cast<index_t>(q.size()), dim, dim};
    layer.softmax_scale = scale;
    const auto fill = [dim](auto& store, auto& views, const auto& heads) {
      for (const auto& head : heads) {
        store.emplace_back();
        for (const float x : head) store.back().push_back(from_float<T>(x));
      }
      for (const auto& s : store)
        views.push_back(dense_rows(static_cast<const T*>(s.data()), static_cast<std::int64_t>(s.size()) / dim, dim));
    };
    fill(keys, layer.keys, k);
    fill(queries, layer.future_queries, q);
  }
  std::vector<float> scores(int threads = 1) const {
    const auto o = layer.observation();
    const index_t width = o.most_tokens();
    std::vector<float> out(static_cast<std::size_t>(o.shape.kv_heads * width), -1.f);
    score_on(host_exec{threads}, score::Oracle{}, o, Matrix<float>{out.data(), o.shape.kv_heads, width, width});
    return out;
  }
};

}  // namespace

TEST_CASE("oracle sums the softmax shares of continuation queries over queries and the group") {
  // One KV head with keys 0 and 1, two query heads with one query each: log 3 and 0 at scale 1.
  const Recorded<float> r({{0, 1}}, {{std::log(3.f)}, {0}}, 1, 1.f);
  const auto got = r.scores();
  CHECK(got[0] == doctest::Approx(0.25 + 0.5));
  CHECK(got[1] == doctest::Approx(0.75 + 0.5));
  // Half the scale: shares 1 : sqrt 3.
  CHECK(Recorded<float>({{0, 1}}, {{std::log(3.f)}}, 1, 0.5f).scores()[1] ==
        doctest::Approx(std::sqrt(3.0) / (1 + std::sqrt(3.0))));
}

TEST_CASE("oracle scores of a head sum to its number of queries, for any lengths, type and threads") {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  const index_t dim = 19;
  const auto rows = [&](index_t n) {
    std::vector<float> out;
    for (index_t i = 0; i < n * dim; ++i) out.push_back(to_float(from_float<fp16_t>(3 * normal(random))));
    return out;
  };
  const std::vector<std::vector<float>> keys{rows(31), rows(17)}, queries{rows(5), rows(5), rows(4), rows(2)};
  const Recorded<float> r(keys, queries, dim, 0.3f);
  const auto got = r.scores();
  double first = 0, second = 0;
  for (std::size_t j = 0; j < 31; ++j) first += static_cast<double>(got[j]);
  for (std::size_t j = 31; j < 48; ++j) second += static_cast<double>(got[j]);
  CHECK(first == doctest::Approx(10));
  CHECK(second == doctest::Approx(6));
  CHECK(got[48] == -1.f);  // past the second head's tokens
  CHECK(r.scores(2) == got);
  CHECK(Recorded<fp16_t>(keys, queries, dim, 0.3f).scores() == got);
}

TEST_CASE("oracle without continuation queries is an error that says where they would come from") {
  const Recorded<float> r({{0, 1}}, {}, 1, 1.f);
  auto layer = r.layer;
  layer.shape.q_heads = 1;
  float out[2];
  CHECK_THROWS_WITH_AS(
      score_on(host_exec{}, score::Oracle{}, layer.observation(), Matrix<float>{out, 1, 2, 2}),
      "oracle: layer 0 has no continuation queries (only recorded dumps have them); this scorer needs it",
      std::invalid_argument);
}
