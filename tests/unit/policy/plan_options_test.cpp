// What a run asks of a planner: an evictable range, newest rows, finished scores; and what it says when a score is NaN.
#include "kvevict/plan/plan_options.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/full.hpp"
#include "kvevict/allocate/global.hpp"
#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cpu/block_topk.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/policy/snapkv.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/snapkv.hpp"

using namespace kvevict;

namespace {

constexpr index_t layers = 4, heads = 16, dim = 8, tokens = 96, window = 8;

// 64 heads of random keys, with queries to look with.
struct Random {
  CacheShape shape{layers, heads, heads, dim, dim};
  std::vector<float> rows, asked;
  std::vector<index_t> positions, window_positions;
  RaggedCache<float> cache{shape};
  Observations<float> seen;

  explicit Random(unsigned seed = 1) : rows(static_cast<std::size_t>(layers * heads * tokens * dim)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : rows) x = normal(random);
    asked.resize(static_cast<std::size_t>(heads * window * dim));
    for (float& x : asked) x = normal(random);
    for (index_t i = 0; i < tokens; ++i) positions.push_back(i);
    window_positions.assign(positions.end() - window, positions.end());
    fill();
  }
  void fill() {
    cache = RaggedCache<float>(shape);
    for (index_t l = 0; l < layers; ++l) {
      std::vector<Rows<const float>> of_layer;
      for (index_t h = 0; h < heads; ++h) of_layer.push_back(dense_rows<const float>(key(l, h, 0), tokens, dim));
      cache.append({}, l, of_layer, of_layer, positions);
    }
    seen = observe_all(cache, 0.35f, [&](OwnedObservation<float>& o) {
      for (index_t q = 0; q < heads; ++q)
        o.window_queries.push_back(
            dense_rows<const float>(asked.data() + std::ptrdiff_t{q} * window * dim, window, dim));
      o.window_positions = window_positions;
    });
  }
  float* key(index_t l, index_t h, index_t t) { return rows.data() + ((l * heads + h) * tokens + t) * dim; }
  std::span<const LayerObservation<float>> observations() const { return seen; }
  std::vector<index_t> counts() const { return std::vector<index_t>(layers * heads, tokens); }
};

bool keeps(std::span<const index_t> kept, index_t row) { return std::binary_search(kept.begin(), kept.end(), row); }

template <class P>
EvictionPlan plan_of(const P& policy, const Random& world, const Budget& budget, const PlanOptions& options = {}) {
  return policy.plan(host_exec{2}, world.cache, world.observations(), budget, options);
}

// Calls check(policy) for policies of every kind of allocator, scorer and selector.
template <class Check>
void for_policies(Check&& check) {
  check(Policy<allocate::Uniform, score::KNorm>{});
  check(Policy<allocate::Uniform, score::SnapKV>{{}, {.window = window}, {}});
  check(Policy<allocate::Pyramid, score::SnapKV>{{}, {.window = window, .protect = ProtectShare::full}, {}});
  check(Policy<allocate::Ada<>, score::SnapKV>{{}, {.window = window}, {}});
  check(Policy<allocate::Ada<allocate::Pyramid>, score::KeyDiff>{});
  check(Policy<allocate::Ada<>, score::SnapKV>{
      {.variant = AdaVariant::reference}, {.window = window, .protect = ProtectShare::full}, {}});
  check(Policy<allocate::Global, score::KNorm>{});
  check(Policy<allocate::Uniform, score::Position>{});
  check(Policy<allocate::Uniform, score::KNorm, BlockTopK>{{}, {}, {8}});
}

}  // namespace

TEST_CASE("while decoding, key scorers evict the row just written unless the newest rows are guaranteed") {
  const Random world;
  const auto heads_without_newest = [&](const auto& policy, index_t recent) {
    const EvictionPlan plan = plan_of(policy, world, Budget::retain(0.5), {.recent = recent});
    CHECK(plan.rows_kept() == plan.granted.total);
    int lost = 0;
    for (index_t l = 0; l < layers; ++l)
      for (index_t h = 0; h < heads; ++h) lost += !keeps(plan.head(l, h), tokens - 1);
    return lost;
  };
  CHECK(heads_without_newest(Policy<allocate::Uniform, score::KNorm>{}, 0) > 10);
  CHECK(heads_without_newest(Policy<allocate::Uniform, score::KeyDiff>{}, 0) > 10);
  CHECK(heads_without_newest(Policy<allocate::Uniform, score::KNorm>{}, 1) == 0);
  CHECK(heads_without_newest(Policy<allocate::Uniform, score::KeyDiff>{}, 1) == 0);
}

TEST_CASE("a shared prefix and the newest rows stay whatever the policy and however small the budget") {
  const Random world;
  for_policies([&](const auto& policy) {
    for (const double retain : {0.06, 0.3, 1.0})
      for (const index_t recent : {0, 3}) {
        INFO(policy.specification(), ", retain ", retain, ", recent ", recent);
        const PlanOptions options{.first = 20, .last = 90, .recent = recent + 6};  // six of them lie behind the range
        const EvictionPlan plan = plan_of(policy, world, Budget::retain(retain), options);
        CHECK(plan.granted.full == layers * heads * 70);
        std::int64_t inside = 0;
        for (index_t l = 0; l < layers; ++l)
          for (index_t h = 0; h < heads; ++h) {
            const auto kept = plan.head(l, h);
            for (index_t r = 0; r < 20; ++r) CHECK(keeps(kept, r));
            for (index_t r = 90 - recent; r < tokens; ++r) CHECK(keeps(kept, r));
            inside += std::ssize(kept) - 26;
          }
        CHECK(inside <= plan.granted.total);
        CHECK(inside == plan.rows_kept() - layers * heads * 26);
        if (retain == 1.0) CHECK(inside == plan.granted.full);
        const auto& audit = plan.audit.entries();
        const auto says = [&](std::string_view words) {
          return std::any_of(audit.begin(), audit.end(),
                             [&](const std::string& e) { return e.find(words) != std::string::npos; });
        };
        CHECK(says("rows 20 to 90 may go"));
        CHECK(says("1664 rows lie outside"));
      }
  });
}

TEST_CASE("a range of everything is no range: the plan is the same") {
  const Random world;
  for_policies([&](const auto& policy) {
    INFO(policy.specification());
    const EvictionPlan plain = plan_of(policy, world, Budget::retain(0.2));
    CHECK(same_rows(plain, plan_of(policy, world, Budget::retain(0.2), {.last = tokens})));
  });
}

TEST_CASE("the ends of a range move inwards to block borders") {
  const PlanOptions options{.first = 17, .last = 90, .align = 16};
  CHECK(options.range(96).begin == 32);
  CHECK(options.range(96).end == 80);
  CHECK(options.range(70).end == 64);  // the last block of a head is not full
  CHECK(options.range(40).empty());
  CHECK(options.range(5).begin == 5);
  CHECK(options.range(0).empty());
  constexpr index_t largest = std::numeric_limits<index_t>::max();
  CHECK(PlanOptions{.first = largest, .align = 7}.range(100).empty());
  CHECK(PlanOptions{.align = 16}.range(largest).size() == largest - 15);
  const Random world;
  const EvictionPlan plan = plan_of(Policy<allocate::Uniform, score::KNorm>{}, world, Budget::retain(0.5),
                                    PlanOptions{.first = 1, .align = 16});
  CHECK(plan.granted.full == layers * heads * 80);
  for (index_t r = 0; r < 16; ++r) CHECK(keeps(plan.head(3, 15), r));
}

TEST_CASE("a budget below what is guaranteed is an error that names the numbers, before any layer") {
  const Random world;
  for_policies([&](const auto& policy) {
    CHECK_THROWS_WITH_AS(
        (void)policy.make_planner(world.shape, world.counts(), Budget::rows(4), {.recent = 5}),
        doctest::Contains("4 rows per head comes to 256 rows, but recent=5 guarantees 320 rows of 64 heads"),
        std::invalid_argument);
  });
  const Policy<allocate::Uniform, score::KNorm> policy;
  const auto refused = [&](const PlanOptions& options, const char* words) {
    CHECK_THROWS_WITH_AS((void)policy.make_planner(world.shape, world.counts(), Budget::rows(4), options),
                         doctest::Contains(words), std::invalid_argument);
  };
  refused({.first = 5, .last = 4}, "rows [5, 4) are no range");
  refused({.first = -1}, "rows [-1, ");
  refused({.align = 0}, "align 0");
  refused({.recent = -1}, "recent -1");
  CHECK_THROWS_WITH_AS((void)policy.make_planner(world.shape, world.counts(), Budget::bytes(1 << 20)),
                       doctest::Contains("a budget in bytes needs PlanOptions::row_bytes"), std::invalid_argument);
  CHECK(
      policy.make_planner(world.shape, world.counts(), Budget::bytes(64 * 64 * 9), {.row_bytes = 64}).granted().total ==
      64 * 9);
}

TEST_CASE("a head that an allocator leaves below the guarantee is raised at the cost of those with most") {
  const Random world;
  // The pyramid gives the last layer one row a head.
  const Policy<allocate::Pyramid, score::KNorm> policy;
  const EvictionPlan without = plan_of(policy, world, Budget::rows(10));
  CHECK(without.head(3, 0).size() == 1);
  const EvictionPlan plan = plan_of(policy, world, Budget::rows(10), {.recent = 4});
  CHECK(plan.rows_kept() == plan.granted.total);
  for (index_t h = 0; h < heads; ++h) CHECK(plan.head(3, h).size() == 4);
}

TEST_CASE("finished scores give the plan of the observations that they come from") {
  const Random world;
  for_policies([&](const auto& policy) {
    INFO(policy.specification());
    const PlanOptions options{.first = 10, .recent = 2};
    auto planner = policy.make_planner(world.shape, world.counts(), Budget::retain(0.2), options);
    for (const auto& o : world.observations()) {
      std::vector<float> scores(static_cast<std::size_t>(heads * (tokens + 5)),
                                1e30f);  // wider rows; the rest is not read
      score_on(host_exec{}, policy.scorer, o, Matrix<float>{scores.data(), heads, tokens, tokens + 5});
      const Matrix<const float> finished{scores.data(), heads, tokens + 5, tokens + 5};
      if (planner.layerwise()) (void)planner.layer(host_exec{}, finished);
      else planner.observe(host_exec{}, finished);
    }
    CHECK(same_rows(planner.finish(host_exec{}), plan_of(policy, world, Budget::retain(0.2), options)));
  });
}

TEST_CASE("finished scores that do not fit are refused, and inputs of the scorer are not asked for") {
  const Random world;
  const Policy<allocate::Uniform, score::SnapKV> policy{{}, {.group = GroupReduction::none}, {}};
  auto planner = policy.make_planner(world.shape, world.counts(), Budget::retain(0.2));
  const std::vector<float> scores(static_cast<std::size_t>(heads * tokens), 1.f);
  const auto refused = [&](const Matrix<const float>& m, const char* words) {
    CHECK_THROWS_WITH_AS((void)planner.layer(host_exec{}, m), doctest::Contains(words), std::invalid_argument);
  };
  refused({scores.data(), heads - 1, tokens, tokens}, "scores [15][96]");
  refused({scores.data(), heads, tokens - 1, tokens}, "[16][96] or wider is required");
  refused({scores.data(), heads, tokens, tokens - 1}, "row stride 95");
  refused({nullptr, heads, tokens, tokens}, "null pointer");
  for (index_t l = 0; l < layers; ++l)
    CHECK(planner.layer(host_exec{}, Matrix<const float>{scores.data(), heads, tokens, tokens}).keep.head(0).size() ==
          19);
  refused({scores.data(), heads, tokens, tokens}, "all 4 layers have been given");
  CHECK_THROWS_WITH_AS(planner.observe(host_exec{}, world.observations()[0]), doctest::Contains("plans layer by layer"),
                       std::invalid_argument);
}

TEST_CASE("a planner outlives the policy that it was made from") {
  const Random world;
  std::optional<LayerPlanner<host_exec, allocate::Uniform, score::SnapKV, TopK>> planner;
  {
    SnapKV policy;
    policy.scorer.window = window;
    planner.emplace(policy.make_planner(world.shape, world.counts(), Budget::retain(0.2)));
  }
  for (const auto& o : world.observations()) (void)planner->layer(host_exec{}, o);
  SnapKV policy;
  policy.scorer.window = window;
  CHECK(same_rows(planner->finish(host_exec{}), plan_of(policy, world, Budget::retain(0.2))));
  auto of_temporary =
      Policy<allocate::Uniform, score::KNorm>{}.make_planner(world.shape, world.counts(), Budget::rows(3));
  CHECK(of_temporary.layer(host_exec{}, world.observations()[0]).keep.head(1).size() == 3);
}

TEST_CASE("a NaN score is blamed on the policy asked, the first head, and the row that holds it, for any threads") {
  Random world;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  *world.key(1, 2, 40) = nan;
  for (index_t h = 3; h < heads; ++h) *world.key(1, h, 7) = nan;
  world.fill();
  for_policies([&](const auto& policy) {
    if (policy.specification().find("position") != std::string::npos) return;  // looks at no key
    for (const int threads : {1, 2, 7})
      for (int run = 0; run < 5; ++run) {
        std::string said;
        try {
          (void)policy.plan(host_exec{threads}, world.cache, world.observations(), Budget::retain(0.5));
        } catch (const std::domain_error& e) {
          said = e.what();
        }
        INFO(said);
        CHECK(said.find(policy.specification() + ": the score of layer 1, head 2, token ") == 0);
        CHECK(said.find("; the key of token 40 holds a value that is not finite") != std::string::npos);
      }
  });
}
