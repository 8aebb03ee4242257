// The benchmark tool: prints the machine, checks every case against its reference, then times them.
//   kvevict_bench [--check] [Google Benchmark's options]
// --check stops after the checks; exit status 1 where one fails.
#include <benchmark/benchmark.h>

#include <exception>
#include <iostream>
#include <regex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/cases.hpp"
#include "common/machine.hpp"

namespace kvevict::bench {
namespace {

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

// Checks what the filter names; the number of failures.
int check_cases(const std::vector<const Case*>& chosen) {
  int failures = 0;
  for (const Case* c : chosen) {
    if (!c->check) continue;
    try {
      c->check();
    } catch (const std::exception& error) {
      std::cerr << c->name << ": " << error.what() << '\n';
      ++failures;
    }
  }
  return failures;
}

int run(int argc, char** argv) {
  bool only_check = false, list = false;
  std::string filter;
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--check") {
      only_check = true;
      continue;
    }
    constexpr std::string_view filter_option = "--benchmark_filter=", list_option = "--benchmark_list_tests";
    if (argument.starts_with(filter_option)) filter = argument.substr(filter_option.size());
    if (argument.starts_with(list_option)) list = !argument.ends_with("=false");
    rest.push_back(argv[i]);
  }
  int count = static_cast<int>(rest.size());
  for (const auto& [key, value] : machine()) benchmark::AddCustomContext(key, value);
  benchmark::Initialize(&count, rest.data());
  if (benchmark::ReportUnrecognizedArguments(count, rest.data())) return 1;

  const bool all = filter.empty() || filter == "all", negated = filter.starts_with('-');
  const std::regex wanted(all ? "." : negated ? filter.substr(1) : filter, std::regex::extended);
  std::vector<const Case*> chosen;
  for (const Case& c : cases())
    if (std::regex_search(c.name, wanted) != negated) chosen.push_back(&c);
  if (!list) {
    const int failures = check_cases(chosen);
    std::cerr << chosen.size() << " cases checked, " << failures << " failed\n";
    if (failures > 0) return 1;
  }
  if (only_check) return 0;
  for (const Case* c : chosen) benchmark::RegisterBenchmark(c->name.c_str(), c->run);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace

void add_case(Case added) { cases().push_back(std::move(added)); }

}  // namespace kvevict::bench

int main(int argc, char** argv) {
  try {
    return kvevict::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "kvevict_bench: " << error.what() << '\n';
    return 1;
  }
}
