// What the commands share: where output goes, how many threads, and the errors of wrong usage.
#pragma once
#include <filesystem>
#include <iosfwd>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/core/exec.hpp"
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
  const Registry* registry = nullptr;
  std::ostream* output = nullptr;
  std::ostream* errors = nullptr;

  host_exec exec() const;
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

// "0.05,0.15": finite numbers in (0, 1], else usage_error.
std::vector<double> read_retains(const std::string& list);

// Where the shipped file of this name lies: $KVEVICT_DATA, the source tree it was built from, the installed data. The
// first throws where it is nowhere, the second answers with an empty text.
std::filesystem::path shipped_data(const std::string& name);
std::string find_shipped(const std::string& name);

// Writes to standard output, or to `--out` as a whole or not at all.
void deliver(const Common& common, const std::string& content);

}  // namespace kvevict::tool
