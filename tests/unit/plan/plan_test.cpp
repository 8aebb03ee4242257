#include <doctest/doctest.h>

#include <vector>

#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/policy/streamingllm.hpp"

using namespace kvevict;

namespace {

// Two layers, one head, `tokens` rows of dimension 1 whose value is their number.
RaggedCache<float> counted(index_t tokens) {
  RaggedCache<float> cache(CacheShape{2, 1, 1, 1, 1});
  std::vector<float> rows;
  std::vector<index_t> positions;
  for (index_t i = 0; i < tokens; ++i) {
    rows.push_back(static_cast<float>(i));
    positions.push_back(i);
  }
  const Rows<const float> view = dense_rows<const float>(rows.data(), tokens, 1);
  for (index_t l = 0; l < 2; ++l) cache.append(host_exec{}, l, std::span(&view, 1), std::span(&view, 1), positions);
  return cache;
}

EvictionPlan streaming(const RaggedCache<float>& cache, const Budget& budget, index_t sinks) {
  const Observations<float> observations = observe_all(cache, 1.f);
  StreamingLLM policy;
  policy.scorer.sinks = sinks;
  return policy.plan(host_exec{}, cache, observations, budget);
}

}  // namespace

TEST_CASE("a plan says what it keeps per layer and head, and a cache carries it out") {
  RaggedCache<float> cache = counted(10);
  const EvictionPlan plan = streaming(cache, Budget::rows(4), 2);
  CHECK(plan.offsets == std::vector<std::int64_t>{0, 4, 8});
  CHECK(plan.indices == std::vector<index_t>{0, 1, 8, 9, 0, 1, 8, 9});
  CHECK(plan.layer(1).keep.head(0)[2] == 8);
  CHECK(plan.asked == "4 rows per head");
  CHECK(plan.granted.total == 8);
  apply(host_exec{}, plan, cache);
  CHECK(cache.tokens(1, 0) == 4);
  CHECK(cache.keys(1, 0).at(2, 0) == 8.f);
  CHECK(cache.positions(0, 0)[3] == 9);
}

TEST_CASE("U43: four sinks in a budget of four: two sinks, two by score, and the audit says so") {
  const EvictionPlan plan = streaming(counted(10), Budget::rows(4), 4);
  CHECK(plan.indices == std::vector<index_t>{0, 1, 8, 9, 0, 1, 8, 9});
  REQUIRE(plan.audit.entries().size() == 1);
  CHECK(plan.audit.entries()[0] ==
        "protection cut in 2 of 2 heads: 2 of the 4 protected rows stay where it was cut most (protect=half)");
}

TEST_CASE("a plan for another shape is refused before anything changes") {
  RaggedCache<float> cache = counted(10);
  EvictionPlan plan = streaming(cache, Budget::rows(4), 2);
  plan.layers = 1;
  CHECK_THROWS_WITH_AS(apply(host_exec{}, plan, cache), doctest::Contains("1 layers of 1 heads"),
                       std::invalid_argument);
  CHECK(cache.tokens(0, 0) == 10);
}

TEST_CASE("merges of a layer are those of its heads") {
  EvictionPlan plan = streaming(counted(10), Budget::rows(4), 2);
  plan.merge_offsets = {0, 1, 3};
  plan.merges = {{0, 2, 1, 1.f}, {0, 3, 1, 0.5f}, {0, 4, 8, 0.25f}};
  CHECK(plan.layer(0).merges.size() == 1);
  CHECK(plan.layer(1).merges.size() == 2);
  CHECK(plan.layer(1).merges[1].from == 4);
}
