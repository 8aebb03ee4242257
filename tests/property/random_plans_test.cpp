// Random policies, budgets and caches: every allocator and scorer of the registry with random legal parameters, on
// ragged and equal heads, empty ones among them, in every element type and every kind of cache. A failure prints the
// seed and the case; KVEVICT_RANDOM_PLANS_FIRST=<seed> KVEVICT_RANDOM_PLANS=1 runs it alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/tool.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/dense.hpp"
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/io/plan_file.hpp"
#include "kvevict/naming/grammar.hpp"
#include "property/world.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

const Registry& registry() {
  static const Registry r = tool::standard_parts();
  return r;
}

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

template <class List>
std::string one_of(const List& list, Random& random) {
  return std::string(list[random.bits() % std::size(list)]);
}

// A legal value of the parameter, or an empty text for one that keeps its default.
std::string value_for(const std::string& part, const std::string& key, bool grouped, Random& random) {
  static const std::map<std::string, std::vector<std::string>> words{
      {"protect", {"half", "full", "score"}},
      {"rows", {"sum", "mean"}},
      {"order", {"group-then-pool", "pool-then-group"}},
      {"normalize", {"auto", "none", "softmax"}},
      {"variant", {"exact", "exact", "kvpress", "reference"}},
      {"exact", {"true", "false"}},
      {"covariance", {"true", "false"}},
      {"value_norm", {"true", "false"}},
      {"floor", {"0", "0.2", "0.333333", "0.9", "1"}},
      {"beta", {"1", "2", "4", "20", "100"}},
      {"epsilon", {"0", "0.02", "1"}},
      {"scratch_limit", {"0", "1", "4096"}},
      {"seed", {"0", "1", "18446744073709551615"}}};
  if (const auto found = words.find(key); found != words.end()) return one_of(found->second, random);
  if (key == "rounding")
    return one_of(part == "pyramid" ? std::vector<std::string>{"exact", "exact", "reference", "kvpress"}
                                    : std::vector<std::string>{"floor", "floor", "kvpress"},
                  random);
  if (key == "group")
    return one_of(grouped ? std::vector<std::string>{"mean", "max", "sum"}
                          : std::vector<std::string>{"none", "mean", "max", "sum"},
                  random);
  if (key == "pool") {
    if (random.integer(0, 2) == 0) return "none";
    return (random.integer(0, 1) ? "avg:" : "max:") + std::to_string(2 * random.integer(0, 5) + 1);
  }
  if (key == "sinks") return std::to_string(random.integer(0, 6));
  if (key == "size") return std::to_string(random.integer(1, 25));
  if (key == "window") return std::to_string(random.integer(1, 20));
  if (key == "minimum") return std::to_string(random.integer(0, 3));
  if (key == "future") return std::to_string(random.integer(1, 600));
  return "";
}

// A part with some of its parameters; `printed` is the part with all of them.
std::string with_parameters(const std::string& base, const PartText& printed, bool grouped, Random& random) {
  std::string args;
  for (const auto& [key, value] : printed.args) {
    if (random.integer(0, 1)) continue;
    const std::string drawn = value_for(printed.name, key, grouped, random);
    if (!drawn.empty()) args += (args.empty() ? "" : ",") + key + '=' + drawn;
  }
  return printed.name + base + (args.empty() ? "" : '(' + args + ')');
}

// LKV's parts are left out: their checkpoints are for one shape.
std::string random_allocator(Random& random, bool may_nest = true) {
  static const std::vector<std::string> all = registry().allocator_names();
  std::string name = one_of(all, random);
  while (name == "lkv-h" || (!may_nest && name != "uniform" && name != "pyramid")) name = one_of(all, random);
  const std::string base =
      name == "ada" && random.integer(0, 1) ? '<' + random_allocator(random, false) + '>' : std::string();
  const std::string printed = registry().allocator({name, nullptr, {}}).specification();
  return with_parameters(base, parse_policy(printed + "/any").first, false, random);
}

std::string random_scorer(Random& random, bool grouped) {
  static const std::vector<std::string> all = registry().scorer_names();
  std::string name = one_of(all, random);
  while (name == "lkv-t") name = one_of(all, random);
  const PartText printed = *parse_policy("any/" + registry().scorer({name, nullptr, {}}).specification()).scorer;
  const std::string base =
      printed.base && random.integer(0, 1) ? '<' + random_scorer(random, grouped) + '>' : std::string();
  return with_parameters(base, printed, grouped, random);
}

struct Case {
  std::uint64_t seed;
  Random random;
  CacheShape shape;
  std::vector<index_t> lengths;
  bool equal;
  std::string policy;
  Budget budget;

  explicit Case(std::uint64_t s)
      : seed(s),
        random(Random(s).bits()),
        shape(random_shape()),
        equal(random.integer(0, 2) == 0),
        policy(),
        budget(Budget::retain(1)) {
    const index_t most = random.integer(0, 2) == 0 ? random.integer(1, 12) : random.integer(13, 90);
    lengths = equal ? equal_lengths(shape, most) : ragged_lengths(shape, 0, most, random.bits());
    const bool grouped = shape.q_heads != shape.kv_heads;
    policy = random_allocator(random) + '/' + random_scorer(random, grouped);
    budget = random_budget();
  }

  // Rounds as a reference code does, so that a plan may keep more than was granted.
  bool parity() const { return policy.find("kvpress") != policy.npos || policy.find("=reference") != policy.npos; }
  std::string text() const {
    std::string out = "seed " + std::to_string(seed) + ": " + policy + ", " + budget.description() + ", " +
                      std::to_string(shape.layers) + " layers of " + std::to_string(shape.kv_heads) +
                      " KV heads, group " + std::to_string(shape.group()) + ", rows";
    for (const index_t t : lengths) out += ' ' + std::to_string(t);
    return out;
  }

 private:
  CacheShape random_shape() {
    const index_t kv = random.integer(1, 3);
    return {random.integer(1, 3), kv, kv * random.integer(1, 3), 2 * random.integer(1, 5), random.integer(1, 7)};
  }
  Budget random_budget() {
    const index_t kind = parity() ? 0 : random.integer(0, 3);
    if (kind == 2) return Budget::rows(random.integer(0, 40));
    if (kind == 3) return Budget::bytes(random.integer(0, 60000));
    return Budget::retain(static_cast<double>(random.integer(1, 1000000)) / 1e6);
  }
};

// Refusals that a random case may meet: the budget cannot be met, or a parity mode asks for another setting.
bool expected_refusal(std::string_view message) {
  for (const std::string_view known :
       {"the minimum is", "give the scorer protect=", "leave exact=true out", "on top of at least 1",
        "belongs to variant=reference", "less than one per head", "needs a budget given as a ratio"})
    if (message.find(known) != message.npos) return true;
  return false;
}

// What any plan promises.
void check_plan_of(const Case& c, const AnyPolicy& policy, const EvictionPlan& plan) {
  const index_t minimum = policy.allocator.minimum_rows;
  std::int64_t full = 0, least = 0;
  for (const index_t t : c.lengths) {
    full += t;
    least += std::min(t, minimum);
  }
  CHECK(plan.granted.full == full);
  CHECK(plan.granted.total <= full);
  if (c.policy.starts_with("full")) CHECK(plan.rows_kept() == full);
  else if (!c.parity()) CHECK(plan.rows_kept() <= plan.granted.total);
  if (plan.granted.is_ratio()) {
    const auto floor = static_cast<std::int64_t>(static_cast<double>(full) * (plan.granted.retain + 1e-7));
    CHECK(plan.granted.total <= std::max(floor, least));
  }
  for (index_t l = 0; l < c.shape.layers; ++l)
    for (index_t h = 0; h < c.shape.kv_heads; ++h) {
      const index_t tokens = c.lengths[static_cast<std::size_t>(c.shape.at(l, h))];
      const auto kept = plan.head(l, h);
      for (std::size_t i = 0; i < kept.size(); ++i) {
        CHECK(kept[i] >= (i == 0 ? 0 : kept[i - 1] + 1));
        CHECK(kept[i] < tokens);
      }
      CHECK(static_cast<index_t>(kept.size()) >= std::min(tokens, minimum));
      // Layer allocators may set aside less in a head than its final rows would protect.
      if (policy.allocator.kind() == AllocatorKind::layer) continue;
      const auto rows =
          protect_within(protect_asked(policy.scorer.protection(), tokens), static_cast<index_t>(kept.size()));
      const auto keeps = [&](index_t row) { return std::binary_search(kept.begin(), kept.end(), row); };
      for (index_t r = 0; r < rows.sinks; ++r) CHECK(keeps(r));
      for (index_t r = tokens - rows.newest; r < tokens; ++r) CHECK(keeps(r));
    }
}

template <class T>
bool same_bits(const Rows<const T>& a, std::int64_t row_a, const Rows<const T>& b, std::int64_t row_b) {
  for (index_t c = 0; c < a.cols; ++c)
    if (std::memcmp(&a.at(row_a, c), &b.at(row_b, c), sizeof(T)) != 0) return false;
  return true;
}

// A cache after the plan holds the kept rows bit for bit, with their positions, and no others.
template <class Cache, class T = typename Cache::element_type>
void check_applied(const Case& c, const World<T>& world, const EvictionPlan& plan) {
  Cache cache(world.rows());
  apply(host_exec{1, nullptr}, plan, cache);
  for (index_t l = 0; l < c.shape.layers; ++l)
    for (index_t h = 0; h < c.shape.kv_heads; ++h) {
      const auto kept = plan.head(l, h);
      REQUIRE(cache.tokens(l, h) == std::ssize(kept));
      bool same = true;
      for (std::size_t i = 0; i < kept.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        same = same && same_bits(cache.keys(l, h), at, world.rows().keys(l, h), kept[i]) &&
               same_bits(cache.values(l, h), at, world.rows().values(l, h), kept[i]) &&
               cache.positions(l, h)[i] == world.rows().positions(l, h)[static_cast<std::size_t>(kept[i])];
      }
      CHECK(same);
    }
  const auto row_bytes = static_cast<std::size_t>(c.shape.head_dim_k + c.shape.head_dim_v) * sizeof(T);
  CHECK(cache.bytes_live() == static_cast<std::size_t>(plan.rows_kept()) * row_bytes);
  CHECK(cache.bytes_reserved() >= cache.bytes_live());
}

bool equal_counts(const EvictionPlan& plan) {
  for (index_t l = 0; l < plan.layers; ++l)
    for (index_t h = 1; h < plan.heads; ++h)
      if (plan.head(l, h).size() != plan.head(l, 0).size()) return false;
  return true;
}

// False where the case was refused, with a reason that may be.
template <class T>
bool check_case(Case& c) {
  const AnyPolicy policy = registry().policy(c.policy);
  const World<T> world(c.shape, c.lengths, c.seed);
  const auto planned = [&](const AnyPolicy& p, int threads) {
    return p.plan(host_exec{threads, nullptr}, world.rows(), world.observations(), c.budget);
  };
  EvictionPlan plan;
  try {
    plan = planned(policy, 1);
  } catch (const std::invalid_argument& refusal) {
    INFO(std::string(refusal.what()));
    CHECK(expected_refusal(refusal.what()));
    return false;
  }
  check_plan_of(c, policy, plan);
  if (c.random.integer(0, 11) == 0) CHECK(same_rows(plan, planned(policy, c.random.integer(0, 1) ? 2 : 7)));
  const AnyPolicy again = registry().policy(plan.specification);
  CHECK(again.specification() == plan.specification);
  CHECK(same_rows(plan, planned(again, 1)));
  if (policy.layerwise()) {
    PlanOptions options;
    options.row_bytes = bytes_per_row<T>(c.shape);
    auto planner = policy.make_planner(c.shape, c.lengths, c.budget, options);
    for (const auto& o : world.observations()) (void)planner.layer(host_exec{1, nullptr}, o);
    CHECK(same_rows(plan, planner.finish(host_exec{1, nullptr})));
  }
  switch (c.random.integer(0, 2)) {
    case 0:
      check_applied<RaggedCache<T>>(c, world, plan);
      break;
    case 1:
      check_applied<PagedCache<T>>(c, world, plan);
      break;
    default:
      if (c.equal && equal_counts(plan)) check_applied<DenseCache<T>>(c, world, plan);
  }
  if (c.random.integer(0, 7) == 0) {
    static const TempDir folder;
    write_plan(folder / "plan", plan, "random");
    const EvictionPlan read = read_plan(folder / "plan");
    CHECK(same_rows(read, plan));
    CHECK(read.specification == plan.specification);
    check_plan(read, c.shape, c.lengths);
    check_applied<RaggedCache<T>>(c, world, read);
  }
  return true;
}

}  // namespace

TEST_CASE("random policies on random caches keep what every plan promises") {
  const std::uint64_t first = number_from("KVEVICT_RANDOM_PLANS_FIRST", 1);
  const std::uint64_t cases = number_from("KVEVICT_RANDOM_PLANS", 2000);
  std::uint64_t planned = 0;
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    Case c(seed);
    INFO(c.text());
    switch (seed % 3) {
      case 0:
        planned += check_case<float>(c);
        break;
      case 1:
        planned += check_case<fp16_t>(c);
        break;
      default:
        planned += check_case<bf16_t>(c);
    }
  }
  if (cases >= 100) CHECK(planned * 2 > cases);  // refusals must not be what is tested
}

TEST_CASE("a layer whose heads are all empty needs no window queries, whatever the allocator") {
  const CacheShape shape{2, 1, 1, 4, 4};
  const World<float> world(shape, {9, 0}, 3);
  for (const char* name : {"snapkv", "adakv", "global/snapkv"}) {
    INFO(name);
    const EvictionPlan plan =
        registry().policy(name).plan(host_exec{1, nullptr}, world.rows(), world.observations(), Budget::retain(0.5));
    CHECK(plan.head(0, 0).size() == 4);
    CHECK(plan.head(1, 0).empty());
  }
}
