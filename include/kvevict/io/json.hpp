// Strict JSON, as the headers of our files need it. An ordinary parser keeps the last of two equal keys without a word,
// and takes a zero byte for the end of the text.
#pragma once
#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Parses `content`. Throws format_error, beginning with `where`, for anything that is not one JSON value: duplicate
// keys, nesting deeper than `most_depth`, text behind the value, invalid UTF-8.
inline nlohmann::json parse_json(std::string_view content, const std::string& where, int most_depth = 64) {
  if (content.find('\0') != content.npos) fail_format(where, ": holds a zero byte; JSON text is required");
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  using Event = nlohmann::json::parse_event_t;
  const auto check = [&](int depth, Event event, nlohmann::json& current) {
    if (depth > most_depth) fail_format(where, ": nested deeper than ", most_depth, " levels");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(current.get<std::string>()).second)
      fail_format(where, ": the key '", current.get<std::string>(), "' stands twice in one object");
    return true;
  };
  try {
    return nlohmann::json::parse(content.begin(), content.end(), check);
  } catch (const nlohmann::json::exception& e) {
    fail_format(where, ": is not valid JSON: ", e.what());
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
