// kvevict eval: policies judged by what a model says after eviction.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/eval_state.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "kvevict/io/mapped_file.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/evaluate.hpp"

namespace kvevict::tool {
namespace {

// FNV-1a of a file's contents.
std::uint64_t fingerprint(const std::filesystem::path& path) {
  const MappedFile file(path);
  std::uint64_t hash = 14695981039346656037u;
  for (const std::byte b : file.bytes()) hash = (hash ^ static_cast<std::uint64_t>(b)) * 1099511628211u;
  return hash;
}

// Everything that a context's results depend on, except the processor.
nlohmann::json run_identity(const EvalOptions& options, const std::string& tasks,
                            const std::vector<NamedPolicy>& policies, const std::vector<double>& retains) {
  auto specs = nlohmann::json::array();
  for (const NamedPolicy& p : policies) specs.push_back(p.policy.specification());
  auto weights = nlohmann::json::object();  // hashing them would take longer than reading them
  for (const auto& entry : std::filesystem::directory_iterator(options.model))
    if (entry.path().extension() == ".safetensors")
      weights[entry.path().filename().string()] = {std::filesystem::file_size(entry.path()),
                                                   entry.last_write_time().time_since_epoch().count()};
  return {{"version of the tool", version_text()},
          {"config.json", fingerprint(std::filesystem::path(options.model) / "config.json")},
          {"weights", weights},
          {"tasks", fingerprint(tasks)},
          {"policies", specs},
          {"retain", retains},
          {"probes", options.probes},
          {"continuation", options.continuation}};
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

nlohmann::ordered_json as_row(const std::string& tasks, const NamedPolicy& named, double retain,
                              const EvaluationResult& r) {
  return {{"tasks", tasks},
          {"policy", named.name},
          {"spec", named.policy.specification()},
          {"retain", retain},
          {"contexts", r.contexts},
          {"probes", r.probes},
          {"kl_answer", number(r.kl_answer)},
          {"kl_continuation", number(r.kl_continuation)},
          {"nll_continuation", number(r.nll_continuation)},
          {"nll_continuation_full", number(r.nll_continuation_full)},
          {"accuracy", number(r.accuracy)},
          {"rows_kept_fraction", number(r.rows_kept_fraction)},
          {"peak_rows_fraction", number(r.peak_rows_fraction)},
          {"seconds", r.seconds}};
}

std::string as_table(const nlohmann::ordered_json& rows) {
  Table table({{"policy", false},
               {"retain", true},
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
  double last = -1;
  for (const auto& r : rows) {
    if (last >= 0 && r["retain"] != last) table.rule();
    last = r["retain"];
    table.add({r["policy"], cell(r["retain"], 3), cell(r["kl_answer"], 4), cell(r["kl_continuation"], 4),
               cell(r["nll_continuation"], 4), cell(r["accuracy"], 3), cell(r["rows_kept_fraction"], 4),
               cell(r["peak_rows_fraction"], 4), cell(r["seconds"], 1)});
  }
  const auto& r = rows.front();
  return joined_text(r["tasks"].get<std::string>(), ": ", r["contexts"].dump(), " contexts, ", r["probes"].dump(),
                     " probes that the full cache answers; its continuation has NLL ",
                     cell(r["nll_continuation_full"], 4), '\n', table.str(),
                     "KL: full cache || evicted one, nats per token\n");
}

}  // namespace

void eval(const Common& common, const EvalOptions& options) {
  const std::vector<NamedPolicy> policies = read_policies(*common.registry, options.policies);
  if (policies.empty()) throw usage_error("eval needs --policy, or --allocator and --scorer");
  const std::vector<double> retains = read_retains(options.retains);
  CaptureOptions capture;
  for (const NamedPolicy& p : policies) {
    if (includes_need(p.policy.scorer.needs, Needs::future_queries))
      throw usage_error("eval: '" + p.name +
                        "' looks at queries that come after eviction; a live model has none yet (compare has)");
    capture.add(p.policy.scorer.needs, p.policy.scorer.window_rows());
  }

  const std::string path = options.tasks.empty() ? shipped_data("dev.safetensors").string() : options.tasks;
  const Tasks tasks(path);
  const std::vector<index_t> contexts = chosen_contexts(tasks, options);
  const Decoder decoder(options.model);
  tasks.check_vocabulary(decoder.config().vocabulary);

  const std::string state_path = !options.state.empty() || common.out.empty() ? options.state : common.out + ".partial";
  EvalState state(state_path, run_identity(options, path, policies, retains), policies.size() * retains.size());
  const auto missing = std::count_if(contexts.begin(), contexts.end(), [&](index_t c) { return !state.find(c); });
  Progress progress(common, static_cast<std::size_t>(missing) * policies.size() * retains.size());
  for (const index_t c : contexts) {
    if (state.find(c)) continue;
    ContextEvaluation evaluation(common.exec(), decoder, tasks, c, capture, {options.probes, options.continuation});
    std::vector<ContextResult> results;
    for (const double retain : retains)
      for (const NamedPolicy& p : policies) {
        results.push_back(evaluation(p.policy, Budget::retain(retain)));
        progress.step(joined_text("context ", c, ", ", p.name));
      }
    state.add(c, std::move(results));
  }
  progress.done();

  auto rows = nlohmann::ordered_json::array();
  std::size_t cell = 0;
  for (const double retain : retains)
    for (const NamedPolicy& p : policies) {
      std::vector<ContextResult> results;
      for (const index_t c : contexts) results.push_back(state.find(c)->at(cell));
      rows.push_back(as_row(path, p, retain, summarise(results)));
      ++cell;
    }
  if (common.format == "json")
    deliver(common, nlohmann::ordered_json{{"format", "kvevict-eval"}, {"version", 1}, {"rows", rows}}.dump(1) + '\n');
  else if (common.format == "csv") deliver(common, as_csv(rows));
  else deliver(common, as_table(rows));
  state.remove();
}

}  // namespace kvevict::tool
