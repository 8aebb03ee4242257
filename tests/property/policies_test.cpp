// The invariants that every policy must satisfy, over one list of policies, every element type and every cache.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/tool.hpp"
#include "kvevict/attention/reference.hpp"
#include "kvevict/cache/dense.hpp"
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"
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

const std::vector<Listed>& policies() {
  static const std::vector<Listed> list{
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
      {.policy = "ada(variant=kvpress)/snapkv(protect=score)", .ratio_only = true},
      {.policy = "pyramid(beta=4)/keydiff"},
      {.policy = "global(minimum=1)/snapkv", .exact = true},
  };
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
  if (!listed.ratio_only) CHECK(plan.rows_kept() <= plan.granted.rows);
  if (listed.exact) CHECK(plan.rows_kept() == plan.granted.rows);
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
          auto planner = policy.begin(shape, lengths, budget);
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
