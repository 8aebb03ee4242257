// kvevict eval: policies judged by what a model says after eviction.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/eval_state.hpp"
#include "cli/files.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "kvevict/core/printable.hpp"
#include "kvevict/io/digest.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/evaluate.hpp"

namespace kvevict::tool {
namespace {

// Everything that a context's results depend on, except the processor: files by their contents.
nlohmann::json run_identity(const EvalOptions& options, const std::string& tasks,
                            const std::vector<NamedPolicy>& policies, const std::vector<AskedBudget>& budgets) {
  auto specs = nlohmann::json::array(), asked = nlohmann::json::array();
  for (const NamedPolicy& p : policies) specs.push_back(printable(p.policy.specification()));
  for (const AskedBudget& b : budgets) asked.push_back(b.budget.description());
  nlohmann::json out{{"version of the tool", version_text()},
                     {"policies", specs},
                     {"budgets", asked},
                     {"probes", options.probes},
                     {"continuation", options.continuation},
                     {"contents of the tasks", file_digest(tasks)}};
  for (const std::string& file : files_in(options.model)) {
    const std::filesystem::path path(file);
    if (path.extension() == ".safetensors" || path.extension() == ".json")
      out["contents of the model's " + printable(path.filename().string())] = file_digest(path);
  }
  for (const auto& [name, digest] : policy_files(policies)) out["contents of " + printable(name)] = digest;
  return out;
}

// Contexts of the asked lengths, at most `limit`.
std::vector<index_t> chosen_contexts(const Tasks& tasks, const EvalOptions& options) {
  std::vector<index_t> out;
  for (index_t c = 0; c < tasks.contexts(); ++c) {
    if (options.context_tokens && std::ssize(tasks.context(c)) != *options.context_tokens) continue;
    if (options.limit && std::ssize(out) == *options.limit) break;
    out.push_back(c);
  }
  if (out.empty())
    fail_format(tasks.name(), ": has no context",
                options.context_tokens ? joined_text(" of ", *options.context_tokens, " tokens") : std::string());
  return out;
}

nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

// A policy at a budget over all contexts.
struct EvalRow {
  std::string tasks;
  const NamedPolicy& named;
  const AskedBudget& asked;
  std::int64_t total_asked = 0, rows_full = 0, rows_kept = 0;
  std::string error{};
  std::vector<ContextResult> results{};

  // total: the rows that the budget asks of this context.
  void add(const EvalCell& cell, std::int64_t total) {
    total_asked += total;
    rows_full += cell.result.rows_full;
    rows_kept += cell.result.rows_kept;
    if (error.empty()) error = cell.error;
    results.push_back(cell.result);
  }

  nlohmann::ordered_json json() const {
    const EvaluationResult r = summarise(results);
    const auto measure = [&](double value) { return error.empty() ? number(value) : nlohmann::ordered_json(); };
    return {{"tasks", tasks},
            {"policy", named.name},
            {"spec", named.policy.specification()},
            {"retain", asked.retain ? nlohmann::ordered_json(*asked.retain) : nlohmann::ordered_json()},
            {"contexts", r.contexts},
            {"probes", error.empty() ? nlohmann::ordered_json(r.probes) : nlohmann::ordered_json()},
            {"kl_answer", measure(r.kl_answer)},
            {"kl_continuation", measure(r.kl_continuation)},
            {"nll_continuation", measure(r.nll_continuation)},
            {"nll_continuation_full", measure(r.nll_continuation_full)},
            {"accuracy", measure(r.accuracy)},
            {"rows_kept_fraction", measure(r.rows_kept_fraction)},
            {"peak_rows_fraction", measure(r.peak_rows_fraction)},
            {"seconds", measure(r.seconds)},
            {"budget", asked.budget.description()},
            {"total_asked", total_asked},
            {"rows_full", rows_full},
            {"rows_kept", error.empty() ? nlohmann::ordered_json(rows_kept) : nlohmann::ordered_json()},
            {"error", error.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(error)}};
  }
};

std::string as_table(const nlohmann::ordered_json& rows) {
  const bool ratios = std::none_of(rows.begin(), rows.end(), [](const auto& r) { return r["retain"].is_null(); });
  Table table({{"policy", false},
               {ratios ? "retain" : "budget", ratios},
               {"KL answer", true},
               {"KL continuation", true},
               {"NLL continuation", true},
               {"accuracy", true},
               {"rows kept", true},
               {"peak rows", true},
               {"seconds", true}});
  const auto cell = [](const nlohmann::ordered_json& value, int digits) {
    return value.is_null() ? std::string("-") : fixed(value.get<double>(), digits);
  };
  const auto unequal = [](const auto& r) { return r["error"].is_null() && r["rows_kept"] != r["total_asked"]; };
  const bool marks = std::any_of(rows.begin(), rows.end(), unequal);
  std::string last, notes;
  const nlohmann::ordered_json* measured = nullptr;
  for (const auto& r : rows) {
    if (!last.empty() && r["budget"] != last) table.rule();
    last = r["budget"];
    table.add({r["policy"], ratios ? cell(r["retain"], 3) : last, cell(r["kl_answer"], 4),
               cell(r["kl_continuation"], 4), cell(r["nll_continuation"], 4), cell(r["accuracy"], 3),
               cell(r["rows_kept_fraction"], 4) + (!marks       ? ""
                                                   : unequal(r) ? " #"
                                                                : "  "),
               cell(r["peak_rows_fraction"], 4), cell(r["seconds"], 1)});
    if (r["error"].is_null()) {
      if (!measured) measured = &r;
    } else if (const std::string line =
                   printable("not measured: " + r["policy"].get<std::string>() + ": " + r["error"].get<std::string>()) +
                   '\n';
               notes.find(line) == notes.npos) {
      notes += line;
    }
  }
  const auto& r = measured ? *measured : rows.front();
  return joined_text(
      printable(r["tasks"].get<std::string>()), ": ", r["contexts"].dump(), " contexts, ",
      r["probes"].is_null() ? "-" : r["probes"].dump(),
      " probes that the full cache answers; its continuation has NLL ", cell(r["nll_continuation_full"], 4), '\n',
      table.str(), "KL: full cache || evicted one, nats per token\n",
      marks ? "# keeps another number of rows than was asked for: not to be compared with the others\n" : "", notes);
}

// What a budget asks of a context, before any policy's minimum.
std::int64_t total_of(const AskedBudget& asked, const CacheShape& shape, std::size_t tokens) {
  const std::vector<index_t> heads(static_cast<std::size_t>(shape.heads_total()), static_cast<index_t>(tokens));
  Audit audit;
  const auto row_bytes = (std::int64_t{shape.head_dim_k} + shape.head_dim_v) * std::int64_t{sizeof(float)};
  return asked.budget.resolve(heads, row_bytes, 0, audit).total;
}

EvalCell evaluate(ContextEvaluation& evaluation, const NamedPolicy& named, const Budget& budget) {
  try {
    return {evaluation(named.policy, budget), ""};
  } catch (const std::invalid_argument& e) {
    return {{}, e.what()};
  } catch (const std::domain_error& e) {
    return {{}, e.what()};
  }
}

}  // namespace

void eval(const Common& common, const EvalOptions& options) {
  std::vector<NamedPolicy> policies = read_policies(*common.registry, options.policies);
  if (policies.empty()) throw usage_error("eval needs --policy, or --allocator and --scorer");
  for (NamedPolicy& p : policies) p = at_equal_total(*common.registry, std::move(p));
  const std::vector<AskedBudget> budgets = read_budgets(options.budgets, eval_retains);
  CaptureOptions capture;
  for (const NamedPolicy& p : policies) {
    if (includes_need(p.policy.scorer.needs, Needs::future_queries))
      throw usage_error("eval: '" + p.name +
                        "' looks at queries that come after eviction; a live model has none yet (compare has)");
    capture.add(p.policy.scorer.needs, p.policy.scorer.window_rows());
  }

  const std::string path = options.tasks.empty() ? shipped_data("dev").string() : options.tasks;
  const std::string state_path = !options.state.empty() || common.out.empty() ? options.state : common.out + ".partial";
  std::vector<std::string> inputs = files_in(options.model);
  inputs.push_back(path);
  for (std::string& file : policy_paths(policies)) inputs.push_back(std::move(file));
  check_outputs({{"--out", common.out}, {"--state", state_path}}, inputs);

  const Tasks tasks(path);
  const std::vector<index_t> contexts = chosen_contexts(tasks, options);
  const Decoder decoder(options.model);
  tasks.check_vocabulary(decoder.config().vocabulary);
  EvalState state(state_path, run_identity(options, path, policies, budgets), policies.size() * budgets.size());
  const auto missing = std::count_if(contexts.begin(), contexts.end(), [&](index_t c) { return !state.find(c); });
  Progress progress(common, static_cast<std::size_t>(missing) * policies.size() * budgets.size());
  for (const index_t c : contexts) {
    if (state.find(c)) continue;
    ContextEvaluation evaluation(common.exec(), decoder, tasks, c, capture, {options.probes, options.continuation});
    std::vector<EvalCell> results;
    for (const AskedBudget& asked : budgets)
      for (const NamedPolicy& p : policies) {
        results.push_back(evaluate(evaluation, p, asked.budget));
        progress.step(joined_text("context ", c, ", ", p.name));
      }
    state.add(c, std::move(results));
  }
  progress.done();

  auto rows = nlohmann::ordered_json::array();
  std::size_t cell = 0;
  const CacheShape shape = decoder.config().cache_shape();
  for (const AskedBudget& asked : budgets)
    for (const NamedPolicy& p : policies) {
      EvalRow row{path, p, asked};
      for (const index_t c : contexts)
        row.add(state.find(c)->at(cell), total_of(asked, shape, tasks.context(c).size()));
      rows.push_back(row.json());
      ++cell;
    }
  if (common.format == "json")
    deliver(common,
            json_text({{"format", "kvevict-eval"}, {"version", 2}, {"files", policy_files(policies)}, {"rows", rows}}));
  else if (common.format == "csv") deliver(common, as_csv(rows));
  else deliver(common, as_table(rows));
  state.remove();
  if (std::none_of(rows.begin(), rows.end(), [](const auto& r) { return r["error"].is_null(); }))
    throw std::runtime_error("nothing could be measured: " + policies.front().name + ": " +
                             rows.front()["error"].get<std::string>());
}

}  // namespace kvevict::tool
