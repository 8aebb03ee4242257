#include "kvevict/policy/planner.hpp"

#include <doctest/doctest.h>

#include <vector>

#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cpu/score_threshold.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/select/score_threshold.hpp"

using namespace kvevict;

namespace {

// Two layers of two heads of six tokens; keys of one value, so that a row's score is minus its size.
struct Room {
  CacheShape shape{2, 2, 2, 1, 1};
  std::vector<float> keys[4] = {{5, 1, 2, 9, 3, 4}, {7, 8, 9, 7, 8, 9}, {1, 1, 1, 1, 1, 1}, {2, 9, 9, 9, 9, 1}};
  std::vector<index_t> positions{0, 1, 2, 3, 4, 5};
  RaggedCache<float> cache{shape};
  Observations<float> observations;

  Room() {
    for (index_t l = 0; l < 2; ++l) {
      std::vector<Rows<const float>> rows;
      for (index_t h = 0; h < 2; ++h) rows.push_back(dense_rows(keys[2 * l + h].data(), 6, 1));
      cache.append({}, l, rows, rows, positions);
    }
    observations = observe_all(cache, 1.f);
  }
};

}  // namespace

TEST_CASE("a threshold may keep fewer rows than the budget, in a plan as well") {
  const Room room;
  const Policy<allocate::Uniform, score::KNorm, ScoreThreshold> policy{{}, {}, {-3.5f}};
  for (const int threads : {1, 2}) {
    // Four rows a head at most: sizes up to 3.5, the smallest four of them.
    const EvictionPlan plan = policy.plan({threads, nullptr}, room.cache, room.observations, Budget::retain(0.67));
    CHECK(plan.offsets == std::vector<std::int64_t>{0, 3, 3, 7, 9});
    CHECK(plan.indices == std::vector<index_t>{1, 2, 4, 0, 1, 2, 3, 0, 5});
    // Where the budget holds everything, the threshold still decides.
    const EvictionPlan all = policy.plan({threads, nullptr}, room.cache, room.observations, Budget::retain(1));
    CHECK(all.offsets == std::vector<std::int64_t>{0, 3, 3, 9, 11});
    RaggedCache<float> cache(room.cache);
    apply(host_exec{}, all, cache);
    CHECK(cache.tokens(0, 1) == 0);
    CHECK(cache.tokens(1, 1) == 2);
    CHECK(cache.keys(1, 1).at(1, 0) == 1);
  }
}

TEST_CASE("a policy begins and plans with an execution object in front as well") {
  const Room room;
  const Policy<allocate::Uniform, score::KNorm> policy;
  const std::vector<index_t> tokens(4, 6);
  auto planner = policy.make_planner(host_exec{}, room.shape, tokens, Budget::retain(0.5));
  for (const auto& o : room.observations.layers()) (void)planner.layer({}, o);
  CHECK(planner.finish({}).indices == policy.plan({}, room.cache, room.observations, Budget::retain(0.5)).indices);
}
