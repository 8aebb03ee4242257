// What the commands share: where output goes, how many threads, what was asked for, and the errors of wrong usage.
#pragma once
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/core/budget.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/io/mapped_file.hpp"
#include "kvevict/naming/registry.hpp"

namespace kvevict::tool {

// Arguments that cannot be meant: exit status 2.
struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Common {
  std::string format = "table";  // table, csv or json
  std::string out;               // a file instead of standard output
  int threads = 0;               // 0: all cores
  bool quiet = false;            // no progress on standard error
  bool no_mmap = false;          // recordings are read into memory rather than mapped
  const Registry* registry = nullptr;
  std::ostream* output = nullptr;
  std::ostream* errors = nullptr;

  host_exec exec() const;
  ReadMode read_mode() const noexcept { return no_mmap ? ReadMode::copy : ReadMode::map; }
};

// A policy as asked, and as built.
struct NamedPolicy {
  std::string name;
  AnyPolicy policy;
};

// Either a list of policies, or a grid of allocators and scorers. Lists are split at commas outside (), <> and quotes.
struct PolicyOptions {
  std::string policies, allocators, scorers;
};
std::vector<NamedPolicy> read_policies(const Registry& registry, const PolicyOptions& options);

// The same policy with exact=true in each allocator that can use up a budget and was not told otherwise, so that
// policies are compared at one total. Its specification says so.
NamedPolicy at_equal_total(const Registry& registry, NamedPolicy named);

// Comma lists of --retain, --rows and --bytes. `usual` are the ratios where nothing is given.
struct BudgetOptions {
  std::string retains, rows, bytes;
};
struct AskedBudget {
  Budget budget;
  std::optional<double> retain;  // as asked; none for rows and bytes
};
// In the order retains, rows, bytes. Throws usage_error for what is no ratio or no whole number.
std::vector<AskedBudget> read_budgets(const BudgetOptions& options, const std::string& usual);

// Where the shipped files lie: the source tree that the tool was built from, the installed data. $KVEVICT_DATA comes
// before both (io/shipped.hpp).
std::vector<std::filesystem::path> data_folders();
// A shipped file by its name without the ending. Throws format_error where it is nowhere.
std::filesystem::path shipped_data(const std::string& name);

// Writes to standard output, or to `--out` as a whole or not at all.
void deliver(const Common& common, const std::string& content);

}  // namespace kvevict::tool
