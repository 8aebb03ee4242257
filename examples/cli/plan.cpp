// kvevict plan: which rows of every head stay under a budget.
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/table.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/plan_file.hpp"

namespace kvevict::tool {
namespace {

Budget asked_budget(const PlanOptions& options) {
  if (options.rows) return Budget::rows(*options.rows);
  if (options.bytes) return Budget::bytes(*options.bytes);
  if (!options.retain) throw usage_error("plan needs a budget: --retain, --rows or --bytes");
  const auto retains = read_retains(*options.retain);
  if (retains.size() != 1) throw usage_error("plan takes one --retain");
  return Budget::retain(retains.front());
}

}  // namespace

void make_plan(const Common& common, const PlanOptions& options) {
  const AnyPolicy policy = common.registry->policy(options.policy);
  const Budget budget = asked_budget(options);
  const std::string path = options.dump.empty() ? shipped_data("smollm2-512.safetensors").string() : options.dump;
  double seconds = 0;
  const EvictionPlan plan = visit_dump(path, [&]<CacheElement T>(const Dump<T>& dump) {
    const Observations<T> observations = observe_all(dump);
    const auto start = std::chrono::steady_clock::now();
    EvictionPlan out = policy.plan(common.exec(), dump.cache(), observations, budget);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return out;
  });
  if (!common.out.empty()) write_plan(common.out, plan, path);

  auto rows = nlohmann::ordered_json::array();
  for (index_t l = 0; l < plan.layers; ++l) {
    std::int64_t kept = 0;
    auto counts = nlohmann::ordered_json::array();
    for (index_t h = 0; h < plan.heads; ++h) {
      kept += std::ssize(plan.head(l, h));
      counts.push_back(plan.head(l, h).size());
    }
    rows.push_back({{"layer", l}, {"rows_kept", kept}, {"per_head", counts}});
  }
  Common summary = common;
  summary.out.clear();
  if (common.format == "json") {
    deliver(summary, nlohmann::ordered_json{{"format", "kvevict-plan-summary"},
                                            {"version", 1},
                                            {"dump", path},
                                            {"policy", options.policy},
                                            {"spec", plan.specification},
                                            {"budget", plan.asked},
                                            {"rows_full", plan.granted.full},
                                            {"rows_granted", plan.granted.total},
                                            {"rows_kept", plan.rows_kept()},
                                            {"audit", plan.audit.entries()},
                                            {"plan_seconds", seconds},
                                            {"layers", rows}}
                             .dump(1) +
                         '\n');
  } else if (common.format == "csv") {
    auto flat = nlohmann::ordered_json::array();
    for (const auto& r : rows)
      for (std::size_t h = 0; h < r["per_head"].size(); ++h)
        flat.push_back({{"layer", r["layer"]}, {"head", h}, {"rows_kept", r["per_head"][h]}});
    deliver(summary, as_csv(flat));
  } else {
    std::string out = plan.specification + " on " + path + "\n" + plan.asked + ": " + std::to_string(plan.rows_kept()) +
                      " of " + std::to_string(plan.granted.full) + " rows kept, " + std::to_string(plan.granted.total) +
                      " granted, planned in " + fixed(seconds * 1e3, 2) + " ms\n";
    Table table({{"layer", true}, {"rows kept", true}, {"per head", false}});
    for (const auto& r : rows) {
      std::string counts;
      for (const auto& n : r["per_head"]) counts += (counts.empty() ? "" : " ") + n.dump();
      table.add({r["layer"].dump(), r["rows_kept"].dump(), counts});
    }
    out += table.str();
    for (const std::string& entry : plan.audit.entries()) out += "audit: " + entry + '\n';
    deliver(summary, out);
  }
}

}  // namespace kvevict::tool
