#include "cli/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <ostream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "kvevict/core/error.hpp"
#include "kvevict/io/atomic_file.hpp"
#include "kvevict/io/shipped.hpp"
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

namespace {

std::string* argument(PartText& part, std::string_view key) {
  for (auto& [name, value] : part.args)
    if (name == key) return &value;
  return nullptr;
}

bool names_exact(const PartText& part) {
  for (const auto& [name, value] : part.args)
    if (name == "exact") return true;
  return part.base && names_exact(*part.base);
}

// exact=true where the part has it and rounds as it does by default: other roundings have sums of their own. `part` is
// a full specification. True where anything changed.
bool make_exact(const Registry& registry, PartText& part) {
  bool changed = false;
  if (part.base) {
    PartText base = *part.base;
    changed = make_exact(registry, base);
    if (changed) part.base = std::make_shared<const PartText>(std::move(base));
  }
  std::string* exact = argument(part, "exact");
  if (!exact || *exact == "true") return changed;
  if (const std::string* rounding = argument(part, "rounding")) {
    PartText usual = parse_policy(registry.allocator({part.name, {}, {}}).specification() + "/x").first;
    if (const std::string* ours = argument(usual, "rounding"); !ours || *ours != *rounding) return changed;
  }
  *exact = "true";
  return true;
}

}  // namespace

NamedPolicy at_equal_total(const Registry& registry, NamedPolicy named) {
  if (names_exact(parse_policy(named.name).first)) return named;
  PartText allocator = parse_policy(named.policy.specification()).first;
  if (make_exact(registry, allocator)) named.policy.allocator = registry.allocator(allocator);
  return named;
}

namespace {

// The whole piece as a number, or usage_error.
template <class N>
N number(const std::string& flag, const std::string& piece, const char* required, bool (*fits)(N)) {
  N value = 0;
  const auto [end, error] = std::from_chars(piece.data(), piece.data() + piece.size(), value);
  if (error != std::errc{} || end != piece.data() + piece.size() || !fits(value))
    throw usage_error(flag + ": '" + piece + "' is not " + required + " is required");
  return value;
}

}  // namespace

std::vector<AskedBudget> read_budgets(const BudgetOptions& options, const std::string& usual) {
  std::vector<AskedBudget> out;
  const bool none = options.retains.empty() && options.rows.empty() && options.bytes.empty();
  const std::string& retains = none ? usual : options.retains;
  if (!retains.empty())
    for (const std::string& piece : split_outside(retains, ',')) {
      const auto ratio = number<double>("--retain", piece, "a ratio kept / full; a number in (0, 1]",
                                        [](double x) { return std::isfinite(x) && x > 0 && x <= 1; });
      out.push_back({Budget::retain(ratio), ratio});
    }
  if (!options.rows.empty())
    for (const std::string& piece : split_outside(options.rows, ','))
      out.push_back({Budget::rows(number<std::int64_t>(
                         "--rows", piece, "a number of rows per head; a whole number from 0 to 2^31 - 1",
                         [](std::int64_t x) { return x >= 0 && x < std::int64_t{1} << 31; })),
                     {}});
  if (!options.bytes.empty())
    for (const std::string& piece : split_outside(options.bytes, ','))
      out.push_back({Budget::bytes(number<std::int64_t>("--bytes", piece, "a number of bytes; a whole number from 0 on",
                                                        [](std::int64_t x) { return x >= 0; })),
                     {}});
  return out;
}

std::vector<std::filesystem::path> data_folders() { return {KVEVICT_SOURCE_DATA, KVEVICT_INSTALLED_DATA}; }

std::filesystem::path shipped_data(const std::string& name) {
  return resolve_shipped(std::string(shipped_prefix) + name, data_folders());
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
