// kvevict plan: which rows of every head stay under a budget.
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/files.hpp"
#include "cli/missing_input.hpp"
#include "cli/table.hpp"
#include "kvevict/core/printable.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/plan_file.hpp"

namespace kvevict::tool {
namespace {

Budget asked_budget(const PlanOptions& options) {
  const std::vector<AskedBudget> budgets = read_budgets(options.budget, "");
  if (budgets.empty()) throw usage_error("plan needs a budget: --retain, --rows or --bytes");
  if (budgets.size() != 1) throw usage_error("plan takes one budget");
  return budgets.front().budget;
}

}  // namespace

void make_plan(const Common& common, const PlanOptions& options) {
  const AnyPolicy policy = common.registry->policy(options.policy);
  const Budget budget = asked_budget(options);
  const std::string path = options.dump.empty() ? shipped_data("smollm2-512").string() : options.dump;
  const std::vector<NamedPolicy> named{{options.policy, policy}};
  std::vector<std::string> inputs = policy_paths(named);
  inputs.push_back(path);
  check_outputs({{"--out", common.out}}, inputs);
  double seconds = 0;
  const EvictionPlan plan = visit_dump(
      path,
      [&]<CacheElement T>(const Dump<T>& dump) {
        const Observations<T> observations = observe_all(dump);
        const auto start = std::chrono::steady_clock::now();
        EvictionPlan out = naming_file(dump, policy.scorer,
                                       [&] { return policy.plan(common.exec(), dump.cache(), observations, budget); });
        seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return out;
      },
      common.read_mode());
  if (!common.out.empty()) write_plan(common.out, plan, printable(path));

  auto rows = nlohmann::ordered_json::array();
  for (index_t l = 0; l < plan.layers; ++l) {
    std::int64_t kept = 0;
    auto counts = nlohmann::ordered_json::array(), kept_rows = nlohmann::ordered_json::array();
    for (index_t h = 0; h < plan.heads; ++h) {
      kept += std::ssize(plan.head(l, h));
      counts.push_back(plan.head(l, h).size());
      kept_rows.push_back(plan.head(l, h));
    }
    rows.push_back({{"layer", l}, {"rows_kept", kept}, {"per_head", counts}, {"kept", kept_rows}});
  }
  Common summary = common;
  summary.out.clear();
  if (common.format == "json") {
    deliver(summary, json_text({{"format", "kvevict-plan-summary"},
                                {"version", 2},
                                {"dump", path},
                                {"policy", options.policy},
                                {"spec", plan.specification},
                                {"budget", plan.asked},
                                {"rows_full", plan.granted.full},
                                {"rows_granted", plan.granted.total},
                                {"rows_kept", plan.rows_kept()},
                                {"audit", plan.audit.entries()},
                                {"plan_seconds", seconds},
                                {"files", policy_files(named)},
                                {"layers", rows}}));
  } else if (common.format == "csv") {
    auto flat = nlohmann::ordered_json::array();
    for (const auto& r : rows)
      for (std::size_t h = 0; h < r["per_head"].size(); ++h)
        flat.push_back({{"layer", r["layer"]}, {"head", h}, {"rows_kept", r["per_head"][h]}});
    deliver(summary, as_csv(flat));
  } else {
    std::string out = printable(plan.specification + " on " + path) + '\n' + plan.asked + ": " +
                      std::to_string(plan.rows_kept()) + " of " + std::to_string(plan.granted.full) + " rows kept, " +
                      std::to_string(plan.granted.total) + " granted, planned in " + fixed(seconds * 1e3, 2) + " ms\n";
    Table table({{"layer", true}, {"rows kept", true}, {"per head", false}});
    for (const auto& r : rows) {
      std::string counts;
      for (const auto& n : r["per_head"]) counts += (counts.empty() ? "" : " ") + n.dump();
      table.add({r["layer"].dump(), r["rows_kept"].dump(), counts});
    }
    out += table.str();
    for (const std::string& entry : plan.audit.entries()) out += "audit: " + printable(entry) + '\n';
    deliver(summary, out);
  }
}

}  // namespace kvevict::tool
