#include "cli/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <thread>

#include "kvevict/core/error.hpp"
#include "kvevict/io/atomic_file.hpp"
#include "kvevict/naming/grammar.hpp"

namespace kvevict::tool {

host_exec Common::exec() const {
  return {threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency())), nullptr};
}

std::vector<NamedPolicy> read_policies(const Registry& registry, const PolicyOptions& options) {
  const bool grid = !options.allocators.empty() || !options.scorers.empty();
  if (grid && (options.allocators.empty() || options.scorers.empty()))
    throw usage_error("a grid needs both --allocator and --scorer");
  std::vector<std::string> names;
  if (!options.policies.empty()) names = split_outside(options.policies, ',');
  if (grid)
    for (const std::string& a : split_outside(options.allocators, ','))
      for (const std::string& s : split_outside(options.scorers, ',')) names.push_back(a + '/' + s);
  std::vector<NamedPolicy> out;
  for (const std::string& name : names) out.push_back({name, registry.policy(name)});
  return out;
}

std::vector<double> read_retains(const std::string& list) {
  std::vector<double> out;
  for (const std::string& piece : split_outside(list, ',')) {
    double value = 0;
    const auto [end, error] = std::from_chars(piece.data(), piece.data() + piece.size(), value);
    if (error != std::errc{} || end != piece.data() + piece.size() || !std::isfinite(value) || value <= 0 || value > 1)
      throw usage_error("--retain: '" + piece + "' is not a ratio kept / full; a number in (0, 1] is required");
    out.push_back(value);
  }
  return out;
}

namespace {

std::vector<std::filesystem::path> data_folders() {
  std::vector<std::filesystem::path> out;
  if (const char* variable = std::getenv("KVEVICT_DATA")) out.emplace_back(variable);
  out.emplace_back(KVEVICT_SOURCE_DATA);
  out.emplace_back(KVEVICT_INSTALLED_DATA);
  return out;
}

}  // namespace

std::string find_shipped(const std::string& name) {
  for (const auto& folder : data_folders())
    if (std::filesystem::exists(folder / name)) return (folder / name).string();
  return "";
}

std::filesystem::path shipped_data(const std::string& name) {
  if (const std::string found = find_shipped(name); !found.empty()) return found;
  std::string tried;
  for (const auto& folder : data_folders()) tried += (tried.empty() ? "" : ", ") + folder.string();
  fail_format(name, ": not found in ", tried, "; set KVEVICT_DATA to the folder that holds it");
}

void deliver(const Common& common, const std::string& content) {
  if (common.out.empty()) {
    *common.output << content << std::flush;
    if (!*common.output) fail_format("standard output: writing failed");
    return;
  }
  AtomicFile file(common.out);
  file.write(content);
  file.commit();
}

}  // namespace kvevict::tool
