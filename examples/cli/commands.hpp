// The commands and their options. Each lives in a file of its name.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/options.hpp"

namespace kvevict::tool {

// compare: a table of policies on recorded dumps.
struct CompareOptions {
  std::vector<std::string> dumps;
  PolicyOptions policies;
  std::string retains = "0.05,0.15,0.3,0.5";
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
  std::optional<std::string> retain;
  std::optional<std::int64_t> rows, bytes;
};
void make_plan(const Common& common, const PlanOptions& options);

// inspect: what a file holds.
struct InspectOptions {
  std::string file;
};
void inspect(const Common& common, const InspectOptions& options);

std::string version_text();

}  // namespace kvevict::tool
