// The commands and their options. Each lives in a file of its name.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/options.hpp"

namespace kvevict::tool {

// compare: a table of policies on recordings.
inline constexpr const char* compare_retains = "0.05,0.15,0.3,0.5";
struct CompareOptions {
  std::vector<std::string> dumps;
  PolicyOptions policies;
  BudgetOptions budgets;
  bool per_layer = false;
};
void compare(const Common& common, const CompareOptions& options);

// score: the scores of a scorer, [head][token] per layer.
struct ScoreOptions {
  std::string dump, policy;
};
void score(const Common& common, const ScoreOptions& options);

// plan: the rows that a policy keeps under a budget.
struct PlanOptions {
  std::string dump, policy;
  BudgetOptions budget;
};
void make_plan(const Common& common, const PlanOptions& options);

// inspect: what a file holds.
struct InspectOptions {
  std::string file;
};
void inspect(const Common& common, const InspectOptions& options);

// record: a model run as a dump.
struct RecordCommandOptions {
  std::string model, tokens, layers, dtype = "f16", description;
  int prompt_len = 0, window = 64, context = 0;
  bool all_queries = false, attention_sums = false, query_statistics = false, output_projection = false;
};
void record_dump(const Common& common, const RecordCommandOptions& options);

// eval: policies judged by what a model says after eviction.
inline constexpr const char* eval_retains = "0.5,0.3,0.15";
struct EvalOptions {
  std::string model, tasks, state;
  PolicyOptions policies;
  BudgetOptions budgets;
  std::optional<std::int64_t> limit, context_tokens;
  int probes = 0, continuation = 0;
};
void eval(const Common& common, const EvalOptions& options);

// train lkv: budgets and scores learned through a model. Common's `out` is the checkpoint.
struct TrainLkvOptions {
  std::string model, tasks, config, cache, model_name;
  std::map<std::string, std::string> values;        // of the recipe, as given
  std::int64_t report = 10, check = 60, save = 10;  // steps between lines, hard losses, saved states
  bool half = true;
};
struct RecipeValue {
  std::string name, usual, kind;  // as text
};
std::vector<RecipeValue> train_lkv_values();
void train_lkv(const Common& common, const TrainLkvOptions& options);

std::string version_text();

}  // namespace kvevict::tool
