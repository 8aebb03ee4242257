// The tool as a function of its arguments, for tests of what it prints.
#pragma once
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/tool.hpp"

namespace kvevict::testing {

struct ToolResult {
  int status;
  std::string out, err;
};

inline ToolResult run_tool(std::vector<std::string> arguments) {
  static const Registry registry = tool::standard_parts();
  std::ostringstream out, err;
  const int status = tool::run(std::move(arguments), registry, out, err);
  return {status, out.str(), err.str()};
}

// What `compare` with these arguments writes as JSON.
inline nlohmann::json compare_json(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "compare");
  arguments.insert(arguments.end(), {"--format", "json"});
  const ToolResult r = run_tool(std::move(arguments));
  REQUIRE_MESSAGE(r.status == 0, r.err);
  return nlohmann::json::parse(r.out);
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace kvevict::testing
