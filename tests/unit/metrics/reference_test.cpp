#include "kvevict/metrics/reference.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "common/random_cache.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/metrics/exact_attention.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

// One head of one layer, row by row: keys and values of one element each.
template <class T = float>
struct Lines {
  using element_type = T;
  using memory_space = host_space;
  std::vector<T> k, v;
  std::vector<index_t> p;
  CacheShape shape() const { return {1, 1, 1, 1, 1}; }
  index_t tokens(index_t, index_t) const { return static_cast<index_t>(p.size()); }
  Rows<const T> keys(index_t, index_t) const { return dense_rows(k.data(), tokens(0, 0), 1); }
  Rows<const T> values(index_t, index_t) const { return dense_rows(v.data(), tokens(0, 0), 1); }
  std::span<const index_t> positions(index_t, index_t) const { return p; }
};

template <class Q>
AttentionResult attend_one(
    const auto& cache, Q query, index_t position, double scale,
    const AttentionOptions<typename std::remove_cvref_t<decltype(cache)>::element_type>& options = {}) {
  const Rows<const Q> row = dense_rows<const Q>(&query, 1, 1);
  const AttentionQueries<Q> queries{std::span(&row, 1), std::span(&position, 1)};
  const AttentionResult out = reference_attention(cache, 0, queries, scale, options),
                        fast = exact_attention(host_exec{}, cache, 0, queries, scale, options);
  CHECK(fast.row(0, 0)[0] == doctest::Approx(out.row(0, 0)[0]).epsilon(1e-14));
  CHECK((fast.lse[0] == out.lse[0] || fast.lse[0] == doctest::Approx(out.lse[0]).epsilon(1e-14)));
  if (options.probabilities) {
    REQUIRE(fast.probabilities[0].size() == out.probabilities[0].size());
    for (std::size_t j = 0; j < out.probabilities[0].size(); ++j)
      CHECK(fast.probabilities[0][j] == doctest::Approx(out.probabilities[0][j]).epsilon(1e-14));
  }
  return out;
}

const float ln2 = std::log(2.f);

}  // namespace

TEST_CASE("weights are the softmax of the scaled products") {
  // Logits 0 and ln 2: weights 1/3 and 2/3 of the values 3 and 6.
  const Lines<> cache{{0, 2 * ln2}, {3, 6}, {0, 1}};
  AttentionOptions<float> options;
  options.probabilities = true;
  const auto out = attend_one(cache, 1.f, 1, 0.5, options);
  CHECK(out.row(0, 0)[0] == doctest::Approx(5).epsilon(1e-7));
  CHECK(out.lse[0] == doctest::Approx(std::log(3.0)).epsilon(1e-7));
  CHECK(out.probabilities[0][0] == doctest::Approx(1. / 3).epsilon(1e-7));
  CHECK(out.probabilities[0][1] == doctest::Approx(2. / 3).epsilon(1e-7));
}

TEST_CASE("U30: masks go by position, not by place") {
  const Lines<> cache{{0, 0, 0}, {3, 6, 12}, {0, 5, 9}};
  CHECK(attend_one(cache, 1.f, 9, 1).row(0, 0)[0] == doctest::Approx(7));
  CHECK(attend_one(cache, 1.f, 5, 1).row(0, 0)[0] == doctest::Approx(4.5));
  CHECK(attend_one(cache, 1.f, 4, 1).row(0, 0)[0] == doctest::Approx(3));
}

TEST_CASE("U46: a query that sees nothing gets zeros, and the largest fp16 logits stay finite") {
  const Lines<> later{{1, 1}, {3, 6}, {4, 5}}, empty{};
  for (const auto* cache : {&later, &empty}) {
    const auto out = attend_one(*cache, 1.f, 3, 1);
    CHECK(out.row(0, 0)[0] == 0.0);
    CHECK(out.lse[0] == minus_infinity);
  }
  const fp16_t most = from_float<fp16_t>(65504.f), least = from_float<fp16_t>(-65504.f);
  const Lines<fp16_t> huge{{most, most, least}, {from_float<fp16_t>(1.f), from_float<fp16_t>(2.f), most}, {0, 1, 2}};
  CHECK(attend_one(huge, most, 9, 1).row(0, 0)[0] == 1.5);
  CHECK(attend_one(huge, least, 9, 1).row(0, 0)[0] == 65504.0);
  CHECK(std::isfinite(attend_one(huge, least, 9, 1).lse[0]));
}

TEST_CASE("rows that are not kept are not seen, and hold probability 0") {
  const Lines<> cache{{0, 50, 0}, {3, 1000, 5}, {0, 1, 2}};
  OwnedKeep keep;
  keep.add_head({0, 2});
  const HeadRows rows = keep.view();
  AttentionOptions<float> options;
  options.keep = &rows;
  options.probabilities = true;
  const auto out = attend_one(cache, 1.f, 9, 1, options);
  CHECK(out.row(0, 0)[0] == 4.0);
  CHECK(out.probabilities[0] == std::vector<double>{0.5, 0, 0.5});
}

TEST_CASE("local rows follow the cache, each visible from its own position on") {
  const Lines<> cache{{0, 0}, {2, 4}, {0, 1}};
  const std::vector<float> k{0, 0}, v{9, 100};
  const std::vector<index_t> positions{2, 3};
  const Rows<const float> keys = dense_rows<const float>(k.data(), 2, 1),
                          values = dense_rows<const float>(v.data(), 2, 1);
  AttentionOptions<float> options;
  options.local = {std::span(&keys, 1), std::span(&values, 1), positions};
  options.probabilities = true;
  const auto out = attend_one(cache, 1.f, 2, 1, options);
  CHECK(out.row(0, 0)[0] == doctest::Approx(5));
  CHECK(out.probabilities[0].size() == 4);
  CHECK(out.probabilities[0][2] == doctest::Approx(1. / 3));
  CHECK(out.probabilities[0][3] == 0.0);
}

TEST_CASE("query heads read the KV head of their group, through any number of queries and odd dimensions") {
  const CacheShape shape{.layers = 2, .kv_heads = 2, .q_heads = 6, .head_dim_k = 5, .head_dim_v = 11};
  const auto cache = random_cache<RaggedCache<bf16_t>>(shape, {3, 40, 19, 33}, 4, true);
  const index_t queries = 67;  // more than one block, and no multiple of the tile
  std::vector<std::vector<float>> data;
  std::vector<Rows<const float>> rows;
  std::vector<index_t> positions;
  for (index_t i = 0; i < queries; ++i) positions.push_back(i);
  for (index_t q = 0; q < 6; ++q) {
    data.push_back(random_elements<float>(static_cast<std::size_t>(queries) * 5, 90 + static_cast<std::uint64_t>(q)));
    rows.push_back(dense_rows<const float>(data.back().data(), queries, 5));
  }
  const AttentionQueries<float> asked{rows, positions};
  AttentionOptions<bf16_t> options;
  options.probabilities = true;
  const auto want = reference_attention(cache, 1, asked, 0.7, options);
  const auto out = exact_attention(host_exec{}, cache, 1, asked, 0.7, options);
  REQUIRE(out.output.size() == want.output.size());
  for (std::size_t i = 0; i < want.output.size(); ++i)
    CHECK(out.output[i] == doctest::Approx(want.output[i]).epsilon(1e-12));
  for (std::size_t q = 0; q < 6; ++q) {
    CHECK(want.probabilities[q].size() == static_cast<std::size_t>(queries * cache.tokens(1, q < 3 ? 0 : 1)));
    for (std::size_t i = 0; i < want.probabilities[q].size(); ++i)
      CHECK(out.probabilities[q][i] == doctest::Approx(want.probabilities[q][i]).epsilon(1e-12));
  }
  // The group, once by hand: query heads 3, 4, 5 read KV head 1, and its first row is all that the query there sees.
  const index_t first = cache.positions(1, 1)[0];
  REQUIRE(first < queries);
  CHECK(want.row(3, first)[10] == doctest::Approx(static_cast<double>(to_float(cache.values(1, 1).at(0, 10)))));
  for (const int threads : {2, 7})
    CHECK(exact_attention(host_exec{threads}, cache, 1, asked, 0.7).output == out.output);
}

TEST_CASE("shapes that do not fit are named") {
  const Lines<> cache{{0}, {0}, {0}};
  const float q[2] = {1, 1};
  const std::vector<index_t> one{0}, two{0, 1};
  const Rows<const float> row = dense_rows<const float>(q, 1, 1), wide = dense_rows<const float>(q, 1, 2);
  const auto run = [&](std::vector<Rows<const float>> rows, const std::vector<index_t>& positions, index_t layer,
                       AttentionOptions<float> options = {}) {
    (void)reference_attention(cache, layer, AttentionQueries<float>{rows, positions}, 1, options);
  };
  CHECK_THROWS_WITH_AS(run({row, row}, one, 0), "attention in layer 0: queries of 2 heads; the model has 1 query heads",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(run({row}, two, 0), "attention in layer 0: queries [1][1]; [2][1] are needed",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(run({wide}, one, 0), "attention in layer 0: queries [1][2]; [1][1] are needed",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(run({row}, one, 1), "attention: layer 1 of 1", std::invalid_argument);
  AttentionOptions<float> options;
  options.local.positions = one;
  CHECK_THROWS_WITH_AS(run({row}, one, 0, options),
                       "attention in layer 0: local rows of 0 and 0 heads; the cache has 1", std::invalid_argument);
  OwnedKeep keep;
  keep.add_head({1});
  const HeadRows rows = keep.view();
  options = {};
  options.keep = &rows;
  CHECK_THROWS_AS(run({row}, one, 0, options), std::invalid_argument);
}
