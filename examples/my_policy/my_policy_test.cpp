#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <vector>

#include "first_heads.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/policy/policy.hpp"
#include "value_norm.hpp"

using namespace kvevict;

namespace {

// One layer, two heads of four rows; dimension 2.
RaggedCache<float> small_cache() {
  static const std::vector<float> a{3, 4, 0, 1, 6, 8, 1, 1}, b{1, 0, 2, 0, 3, 0, 4, 0};
  RaggedCache<float> cache(CacheShape{1, 2, 2, 2, 2});
  const std::vector<Rows<const float>> rows{dense_rows<const float>(a.data(), 4, 2),
                                            dense_rows<const float>(b.data(), 4, 2)};
  cache.append(host_exec{}, 0, rows, rows, std::vector<index_t>{0, 1, 2, 3});
  return cache;
}

template <class P>
EvictionPlan plan(const P& policy, const RaggedCache<float>& cache, const Budget& budget) {
  const auto layer = observe_layer(cache, 0, 1.f);
  const LayerObservation<float> observation = layer.observation();
  return policy.plan(host_exec{}, cache, std::span(&observation, 1), budget);
}

std::vector<index_t> head(const EvictionPlan& plan, index_t h) {
  return {plan.head(0, h).begin(), plan.head(0, h).end()};
}

}  // namespace

TEST_CASE("the rows with the largest values stay") {
  const auto cache = small_cache();
  // Norms of head 0: 5, 1, 10, 1.41; of head 1: 1, 2, 3, 4.
  const auto p = plan(Policy{FirstHeads{1, 1.0}, ValueNorm{}}, cache, Budget::rows(2));
  CHECK(head(p, 0) == std::vector<index_t>{0, 2});
  CHECK(head(p, 1) == std::vector<index_t>{2, 3});
}

TEST_CASE("the norm is a parameter") {
  // Norm 1 of head 0: 7, 1, 14, 2: with one protected sink and two rows, the sink and the best of the others.
  const auto p = plan(Policy{FirstHeads{1, 1.0}, ValueNorm{{.sinks = 1}, 1}}, small_cache(), Budget::rows(3));
  CHECK(head(p, 0) == std::vector<index_t>{0, 2, 3});
  CHECK_THROWS_AS(plan(Policy{FirstHeads{}, ValueNorm{{}, 3}}, small_cache(), Budget::rows(2)), std::invalid_argument);
}

TEST_CASE("the first head gets its weight in rows, and the sum is exact") {
  // 4 rows in all, weights 3 and 1.
  const auto p = plan(Policy{FirstHeads{1, 3.0}, ValueNorm{}}, small_cache(), Budget::rows(2));
  CHECK(p.head(0, 0).size() == 3);
  CHECK(p.head(0, 1).size() == 1);
}
