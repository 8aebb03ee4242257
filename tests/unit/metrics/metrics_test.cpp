#include "kvevict/metrics/metrics.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/random_cache.hpp"
#include "kvevict/cache/ragged.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

// One layer of 1 head, 2 query heads and 3 prompt rows with dim 1, and one continuation row at position 3.
struct Example {
  CacheShape shape{.layers = 1, .kv_heads = 1, .q_heads = 2, .head_dim_k = 1, .head_dim_v = 1};
  float ln2 = std::log(2.f);
  std::vector<float> k{0, ln2, 0}, v{1, 3, 5}, q0{1}, q1{0}, local_k{0}, local_v{8};
  RaggedCache<float> cache{shape};
  Rows<const float> local_keys = dense_rows<const float>(local_k.data(), 1, 1);
  Rows<const float> local_values = dense_rows<const float>(local_v.data(), 1, 1);
  std::vector<Rows<const float>> q{dense_rows<const float>(q0.data(), 1, 1), dense_rows<const float>(q1.data(), 1, 1)};
  std::vector<index_t> position{3};

  Example() {
    const Rows<const float> keys = dense_rows<const float>(k.data(), 3, 1),
                            values = dense_rows<const float>(v.data(), 3, 1);
    cache.append(host_exec{}, 0, std::span(&keys, 1), std::span(&values, 1), std::vector<index_t>{0, 1, 2});
  }
  AttentionQueries<float> queries() const { return {q, position}; }
  LocalRows<float> local() const { return {std::span(&local_keys, 1), std::span(&local_values, 1), position}; }
  LayerTruth truth() const { return layer_truth(host_exec{}, cache, 0, queries(), 1, local()); }
};

OwnedKeep keep_of(const std::vector<index_t>& rows) {
  OwnedKeep keep;
  keep.add_head(rows);
  return keep;
}

}  // namespace

TEST_CASE("mass is that of the prompt rows alone, summed over the group") {
  // Query head 0 sees logits 0, ln 2, 0: weights 1/4, 1/2, 1/4. Query head 1 sees zeros: 1/3 each.
  const LayerTruth truth = Example().truth();
  CHECK(truth.mass[0][0] == doctest::Approx(1. / 4 + 1. / 3).epsilon(1e-7));
  CHECK(truth.mass[0][1] == doctest::Approx(1. / 2 + 1. / 3).epsilon(1e-7));
  CHECK(mass_recall(truth, keep_of({1}).view()) == doctest::Approx((1. / 2 + 1. / 3) / 2).epsilon(1e-7));
  CHECK(mass_recall(truth, keep_of({0, 2}).view()) == doctest::Approx((1. / 2 + 2. / 3) / 2).epsilon(1e-7));
  CHECK(mass_recall(truth, keep_of({0, 1, 2}).view()) == doctest::Approx(1));
  CHECK(mass_recall(truth, keep_of({}).view()) == 0.0);
  CHECK_THROWS_AS(mass_recall(truth, keep_of({3}).view()), std::invalid_argument);
}

TEST_CASE("output_error compares outputs that see the continuation") {
  // Full: head 0 weights 1/5, 2/5, 1/5 and 1/5 for the continuation: (1 + 6 + 5 + 8) / 5 = 4. Head 1: 17 / 4 = 4.25.
  // Kept row 1 and the continuation: head 0 (2 * 3 + 8) / 3 = 14/3, head 1 (3 + 8) / 2 = 5.5.
  const Example e;
  const LayerTruth truth = e.truth();
  auto cache = e.cache;
  cache.compact(host_exec{}, 0, {keep_of({1}).view(), {}});
  const double expected = (std::abs(4 - 14. / 3) / 4 + 1.25 / 4.25) / 2;
  CHECK(output_error(host_exec{}, truth, cache, e.queries(), 1, e.local()) == doctest::Approx(expected).epsilon(1e-6));
  CHECK(output_error(host_exec{}, truth, e.cache, e.queries(), 1, e.local()) == 0.0);
}

TEST_CASE("the best selection takes the largest masses of all layers and heads") {
  LayerTruth a, b;
  a.q_heads = b.q_heads = 2;
  a.queries = b.queries = 1;
  a.mass = {{0.9, 0.1}, {0.6, 0.4}};
  b.mass = {{0.5, 0.5}, {1.0, 0.0}};
  const std::vector<LayerTruth> layers{a, b};
  // The three largest: 1.0, 0.9, 0.6 of a mass of 2 per layer.
  CHECK(best_mass_recall(layers, 3) == doctest::Approx(2.5 / 4));
  CHECK(best_mass_recall(layers, 8) == doctest::Approx(1));
  CHECK(best_mass_recall(layers, 100) == doctest::Approx(1));
  CHECK(best_mass_recall(layers, 0) == 0.0);
  CHECK(oracle_gap(layers, 3, 0.5) == doctest::Approx(0.125));
}

TEST_CASE("a layer without continuation queries cannot be measured") {
  const Example e;
  const std::vector<Rows<const float>> none(2, dense_rows<const float>(nullptr, 0, 1));
  CHECK_THROWS_WITH_AS(layer_truth(host_exec{}, e.cache, 0, AttentionQueries<float>{none, {}}, 1, e.local()),
                       "metrics: layer 0 has no continuation queries to measure with", std::invalid_argument);
}

TEST_CASE("no selection of a random cache beats the best one") {
  const CacheShape shape{.layers = 2, .kv_heads = 2, .q_heads = 4, .head_dim_k = 8, .head_dim_v = 8};
  const auto cache = random_cache<RaggedCache<fp16_t>>(shape, ragged_lengths(shape, 20, 40, 1), 4);
  std::vector<std::vector<fp16_t>> data;
  std::vector<Rows<const fp16_t>> q;
  const std::vector<index_t> positions{100, 101, 102};
  for (index_t h = 0; h < 4; ++h) {
    data.push_back(random_elements<fp16_t>(3 * 8, static_cast<std::uint64_t>(h)));
    q.push_back(dense_rows<const fp16_t>(data.back().data(), 3, 8));
  }
  std::vector<LayerTruth> layers;
  for (index_t l = 0; l < 2; ++l)
    layers.push_back(layer_truth(host_exec{}, cache, l, AttentionQueries<fp16_t>{q, positions}, 1, {}));
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    double recall = 0;
    std::int64_t total = 0;
    for (index_t l = 0; l < 2; ++l) {
      const OwnedKeep keep = random_keep(cache, l, 3, false, seed);
      recall += mass_recall(layers[static_cast<std::size_t>(l)], keep.view()) / 2;
      total += keep.offsets.back();
    }
    CHECK(oracle_gap(layers, total, recall) > 0);
  }
}

TEST_CASE("a value that is no number is named, never counted as an error of nothing") {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const auto refusal = [](const Example& e) -> std::string {
    try {
      (void)e.truth();
    } catch (const std::domain_error& error) {
      return error.what();
    }
    return "";
  };
  for (const float bad : {nan, inf, -inf}) {
    Example value, key, local, query;
    value.v[1] = key.k[2] = local.local_v[0] = query.q1[0] = bad;
    for (Example* e : {&value, &key}) {
      e->cache = RaggedCache<float>(e->shape);
      const auto keys = dense_rows<const float>(e->k.data(), 3, 1), values = dense_rows<const float>(e->v.data(), 3, 1);
      e->cache.append(host_exec{}, 0, std::span(&keys, 1), std::span(&values, 1), std::vector<index_t>{0, 1, 2});
    }
    CHECK(refusal(value).starts_with("layer 0, head 0, token 1: element 0 of the value is "));
    CHECK(refusal(key).starts_with("layer 0, head 0, token 2: element 0 of the key is "));
    CHECK(refusal(local).starts_with("layer 0, head 0, token 3: element 0 of the value is "));
    CHECK(refusal(query).starts_with("layer 0, query head 1, token 0: element 0 of the query is "));
  }
  // A compacted cache that holds what the full one did not: the error is no number.
  Example e;
  const LayerTruth truth = e.truth();
  RaggedCache<float> spoilt(e.shape);
  e.v[0] = nan;
  const auto keys = dense_rows<const float>(e.k.data(), 3, 1), values = dense_rows<const float>(e.v.data(), 3, 1);
  spoilt.append(host_exec{}, 0, std::span(&keys, 1), std::span(&values, 1), std::vector<index_t>{0, 1, 2});
  CHECK(std::isnan(output_error(host_exec{}, truth, spoilt, e.queries(), 1, e.local())));
}
