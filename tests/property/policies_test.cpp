// The invariants that every policy must satisfy, over one list of policies, every element type and every cache.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/tool.hpp"
#include "kvevict/cache/dense.hpp"
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/metrics/exact_attention.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/plan/union_form.hpp"
#include "kvevict/policy/policy.hpp"
#include "property/world.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

struct Listed {
  std::string policy;
  bool empty_heads = false;  // legal in this method
  bool exact = false;        // meets the granted total exactly
  bool head_blind = true;    // the head's number does not enter
  bool ratio_only = false;   // a parity mode that needs a ratio and may round above the floor
};

// KVEVICT_PROPERTY in the environment leaves only policies whose text contains it.
std::vector<Listed> asked(std::vector<Listed> all) {
  if (const char* text = std::getenv("KVEVICT_PROPERTY"))
    std::erase_if(all, [&](const Listed& l) { return l.policy.find(text) == std::string::npos; });
  return all;
}

const std::vector<Listed>& policies() {
  static const std::vector<Listed> list = asked({
      {.policy = "random", .head_blind = false},
      {.policy = "streamingllm"},
      {.policy = "knorm"},
      {.policy = "keydiff"},
      {.policy = "expected"},
      {.policy = "snapkv"},
      {.policy = "snapkv-kvpress", .ratio_only = true},
      {.policy = "pyramidkv"},
      {.policy = "adakv", .exact = true},
      {.policy = "oracle", .empty_heads = true, .exact = true},
      {.policy = "uniform(exact=true)/snapkv(pool=avg:5,group=max,protect=full)", .exact = true, .head_blind = false},
      {.policy = "uniform/snapkv(pool=none,group=sum,rows=sum,sinks=2)"},
      {.policy = "ada<pyramid>/snapkv"},
      {.policy = "ada<uniform>/keydiff"},
      {.policy = "ada(floor=0.5)/knorm", .exact = true},
      // Window columns of all heads have one score here, so heads tie and the lower one wins.
      {.policy = "ada(variant=kvpress)/snapkv(protect=score)", .head_blind = false, .ratio_only = true},
      {.policy = "pyramid(beta=4)/keydiff"},
      {.policy = "uniform/chunks<snapkv>"},
      {.policy = "ada/chunks<keydiff>(size=5)", .exact = true},
      {.policy = "global(minimum=1)/snapkv", .exact = true},
  });
  return list;
}

const Registry& registry() {
  static const Registry r = tool::standard_parts();
  return r;
}

const CacheShape shape{3, 2, 6, 8, 6};

std::vector<index_t> lengths_equal() { return equal_lengths(shape, 60); }
std::vector<index_t> lengths_ragged() { return {60, 44, 31, 60, 52, 7}; }

template <class T>
EvictionPlan plan_of(const AnyPolicy& policy, const World<T>& world, const Budget& budget, int threads = 1) {
  return policy.plan(host_exec{threads, nullptr}, world.rows(), world.observations(), budget);
}

template <class T>
void check_well_formed(const Listed& listed, const EvictionPlan& plan, const World<T>& world, const Budget& budget) {
  INFO(listed.policy, " at ", budget.description());
  std::int64_t heads = 0, non_empty = 0;
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      const auto kept = plan.head(l, h);
      CHECK(std::is_sorted(kept.begin(), kept.end()));
      CHECK(std::adjacent_find(kept.begin(), kept.end()) == kept.end());
      if (!kept.empty()) {
        CHECK(kept.front() >= 0);
        CHECK(kept.back() < world.rows().tokens(l, h));
      }
      ++heads;
      non_empty += !kept.empty();
    }
  if (!listed.empty_heads) CHECK(non_empty == heads);
  if (!listed.ratio_only) CHECK(plan.rows_kept() <= plan.granted.total);
  if (listed.exact) CHECK(plan.rows_kept() == plan.granted.total);
}

// Attention over the compacted cache equals attention over the full cache with the evicted rows masked: this catches
// position, group, gather and stride faults together.
template <class Cache>
void check_attention(const std::string& policy, const World<typename Cache::element_type>& world,
                     const EvictionPlan& plan) {
  using T = typename Cache::element_type;
  const host_exec exec{};
  const Cache full(world.rows());
  Cache small(world.rows());
  apply(exec, plan, small);
  for (const auto& o : world.observations()) {
    // At positions inside and behind the cache, so that masking by position is part of it.
    const std::vector<index_t> positions{5, 30, 61, 62, 70};
    const AttentionQueries<T> queries{o.extras.future_queries, positions};
    const HeadRows keep = plan.layer(o.layer).keep;
    AttentionOptions<T> masked;
    masked.keep = &keep;
    const auto want = exact_attention(exec, full, o.layer, queries, 0.4, masked);
    const auto got = exact_attention(exec, small, o.layer, queries, 0.4, AttentionOptions<T>{});
    INFO(policy, ", layer ", o.layer);
    REQUIRE(got.output.size() == want.output.size());
    double worst = 0;
    for (std::size_t i = 0; i < got.output.size(); ++i)
      worst = std::max(worst, std::abs(got.output[i] - want.output[i]));
    CHECK(worst < 1e-12);
  }
  CHECK(small.bytes_live() == static_cast<std::size_t>(plan.rows_kept()) * (8 + 6) * sizeof(T));
}

// One pass over the list per element type.
template <class T>
void check_all() {
  for (const Listed& listed : policies()) {
    const AnyPolicy policy = registry().policy(listed.policy);
    for (const auto& lengths : {lengths_equal(), lengths_ragged()}) {
      const World<T> world(shape, lengths, 7);
      for (const double retain : {0.05, 0.15, 0.5, 0.9}) {
        const Budget budget = Budget::retain(retain);
        const EvictionPlan plan = plan_of(policy, world, budget);
        check_well_formed(listed, plan, world, budget);

        {
          INFO("scores and plans do not depend on threads");
          CHECK(same_rows(plan, plan_of(policy, world, budget, 2)));
          CHECK(same_rows(plan, plan_of(policy, world, budget, 7)));
        }
        check_attention<RaggedCache<T>>(listed.policy, world, plan);
        check_attention<PagedCache<T>>(listed.policy, world, plan);
        if (listed.policy == "snapkv" && lengths == lengths_equal())
          check_attention<DenseCache<T>>(listed.policy, world, plan);
        {
          INFO("policies are stateless: planning B after A equals planning B");
          const World<T> other(shape, lengths_equal(), 8);
          (void)plan_of(policy, other, Budget::retain(0.3));
          CHECK(same_rows(plan, plan_of(policy, world, budget)));
        }
        {
          INFO("U49: the specification of a plan builds the same policy again");
          const AnyPolicy again = registry().policy(plan.specification);
          CHECK(again.specification() == plan.specification);
          CHECK(same_rows(plan, plan_of(again, world, budget)));
        }
        if (policy.layerwise()) {
          INFO("layer by layer equals all at once");
          auto planner = policy.make_planner(shape, lengths, budget);
          for (const auto& o : world.observations()) {
            const LayerPlan layer = planner.layer(host_exec{}, o);
            for (index_t h = 0; h < shape.kv_heads; ++h) {
              const auto got = layer.keep.head(h);
              const auto want = plan.head(o.layer, h);
              CHECK(std::equal(got.begin(), got.end(), want.begin(), want.end()));
            }
          }
        }
        if (listed.head_blind && lengths == lengths_equal()) {
          INFO("permuting KV heads with their queries permutes the plan");
          const World<T> swapped(shape, lengths, 7, {1, 0});
          const EvictionPlan other = plan_of(policy, swapped, budget);
          for (index_t l = 0; l < shape.layers; ++l)
            for (index_t h = 0; h < shape.kv_heads; ++h) {
              INFO(listed.policy, ", layer ", l);
              const auto a = plan.head(l, h), b = other.head(l, 1 - h);
              CHECK(std::equal(a.begin(), a.end(), b.begin(), b.end()));
            }
        }
      }
      {
        INFO("a budget that covers everything is the identity");
        for (const Budget& budget : {Budget::retain(1.0), Budget::rows(1000), Budget::bytes(1 << 30)}) {
          if (listed.ratio_only && budget.unit() != Budget::Unit::retain) continue;
          const EvictionPlan plan = plan_of(policy, world, budget);
          CHECK(plan.rows_kept() == plan.granted.full);
        }
      }
    }
    {
      INFO("heads of 0 and 1 tokens are legal");
      const World<T> world(shape, {1, 1, 0, 2, 1, 3}, 3);
      const EvictionPlan plan = plan_of(policy, world, Budget::retain(0.5));
      for (index_t l = 0; l < shape.layers; ++l)
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          INFO(listed.policy, ", layer ", l, ", head ", h);
          CHECK(static_cast<index_t>(plan.head(l, h).size()) <= world.rows().tokens(l, h));
          if (!listed.empty_heads && world.rows().tokens(l, h) > 0) CHECK(plan.head(l, h).size() >= 1);
        }
    }
  }
}

}  // namespace

TEST_CASE("every policy satisfies the invariants on float caches") { check_all<float>(); }
TEST_CASE("every policy satisfies the invariants on fp16 caches") { check_all<fp16_t>(); }
TEST_CASE("every policy satisfies the invariants on bf16 caches") { check_all<bf16_t>(); }

TEST_CASE("U37: a plan with heads {0,1} and {1,2} is the union {0,1,2} with masks 110 and 011") {
  const std::vector<std::int64_t> offsets{0, 2, 4};
  const std::vector<index_t> rows{0, 1, 1, 2};
  const UnionForm form = union_form({offsets, rows});
  CHECK(form.rows == std::vector<index_t>{0, 1, 2});
  CHECK(form.attend == std::vector<std::uint8_t>{1, 1, 0, 0, 1, 1});
}

TEST_CASE("U41: what a policy cannot do is a capability that can be asked, and a refused call") {
  const AnyPolicy oracle = registry().policy("oracle");
  CHECK_FALSE(oracle.layerwise());
  CHECK(registry().policy("adakv").layerwise());
  const World<float> world(shape, lengths_equal(), 7);
  auto planner = oracle.make_planner(shape, lengths_equal(), Budget::retain(0.5));
  CHECK_THROWS_WITH_AS((void)planner.layer(host_exec{}, world.observations()[0]),
                       doctest::Contains("needs the scores of every layer"), std::invalid_argument);
}

TEST_CASE("a planner refuses layers out of order, other shapes and other lengths") {
  const AnyPolicy policy = registry().policy("knorm");
  const World<float> world(shape, lengths_equal(), 7);
  auto planner = policy.make_planner(shape, lengths_ragged(), Budget::retain(0.5));
  CHECK_THROWS_WITH_AS((void)planner.layer(host_exec{}, world.observations()[1]), doctest::Contains("layer 0 is next"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)planner.layer(host_exec{}, world.observations()[0]),
                       doctest::Contains("44 were announced"), std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)planner.finish(host_exec{}), doctest::Contains("0 of 3 layers"), std::invalid_argument);
  CHECK_THROWS_AS((void)policy.make_planner(shape, std::vector<index_t>{1, 2}, Budget::retain(0.5)),
                  std::invalid_argument);
}

TEST_CASE("NaN in a score names layer, head and token") {
  const CacheShape one{2, 1, 1, 2, 2};
  std::vector<float> rows(2 * 8, 1.f);
  rows[2 * 3] = std::nanf("");
  const std::vector<index_t> positions{0, 1, 2, 3, 4, 5, 6, 7};
  RaggedCache<float> cache(one);
  const std::vector<float> clean(2 * 8, 1.f);
  const Rows<const float> good = dense_rows<const float>(clean.data(), 8, 2),
                          bad = dense_rows<const float>(rows.data(), 8, 2);
  cache.append(host_exec{}, 0, std::span(&good, 1), std::span(&good, 1), positions);
  cache.append(host_exec{}, 1, std::span(&bad, 1), std::span(&good, 1), positions);
  const Observations<float> observations = observe_all(cache, 1.f);
  for (const char* name : {"knorm", "ada/knorm", "global/knorm"})
    CHECK_THROWS_WITH_AS((void)registry().policy(name).plan(host_exec{}, cache, observations, Budget::retain(0.5)),
                         doctest::Contains("layer 1, head 0, token 3"), std::domain_error);
}

TEST_CASE("U53: a needle outside the window is found or lost, per policy, and the rows say which") {
  // 200 rows about one direction; row 20 has a key of its own that a later question will look for. The window does not.
  const CacheShape one{1, 1, 1, 8, 8};
  std::vector<float> keys = random_elements<float>(200 * 8, 3, 0.3f), window(32 * 8, 0.f);
  for (float& x : keys) x += 1.f;
  for (int c = 0; c < 8; ++c) keys[20 * 8 + static_cast<std::size_t>(c)] = c % 2 ? 3.f : -3.f;
  std::vector<index_t> positions(200);
  for (index_t i = 0; i < 200; ++i) positions[static_cast<std::size_t>(i)] = i;
  RaggedCache<float> cache(one);
  const Rows<const float> view = dense_rows<const float>(keys.data(), 200, 8);
  cache.append(host_exec{}, 0, std::span(&view, 1), std::span(&view, 1), positions);
  auto layer = observe_layer(cache, 0, 0.35f);
  layer.window_queries.push_back(dense_rows<const float>(window.data(), 32, 8));
  layer.window_positions = std::span(positions).last(32);
  const LayerObservation<float> observation = layer.observation();
  const auto found = [&](const char* name) {
    const auto plan = registry().policy(name).plan(host_exec{}, cache, std::span(&observation, 1), Budget::rows(40));
    const auto kept = plan.head(0, 0);
    return std::find(kept.begin(), kept.end(), 20) != kept.end();
  };
  CHECK(found("keydiff"));             // unlike the others
  CHECK_FALSE(found("streamingllm"));  // neither first nor newest
  CHECK_FALSE(found("knorm"));         // a large key norm
}
