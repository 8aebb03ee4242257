#include "cli/table.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>

namespace kvevict::tool {

std::string Table::str() const {
  std::vector<std::size_t> width;
  for (const Column& c : columns_) width.push_back(c.title.size());
  for (const auto& line : lines_)
    for (std::size_t c = 0; c < line.size(); ++c) width[c] = std::max(width[c], line[c].size());

  std::string out;
  const auto print = [&](std::size_t c, const std::string& cell) {
    const std::string space(width[c] - cell.size(), ' ');
    out += (c ? "  " : "") + (columns_[c].number ? space + cell : cell + space);
  };
  const auto end_line = [&] {
    while (!out.empty() && out.back() == ' ') out.pop_back();
    out += '\n';
  };
  const auto rule = [&] {
    for (std::size_t c = 0; c < columns_.size(); ++c) out += (c ? "  " : "") + std::string(width[c], '-');
    out += '\n';
  };
  for (std::size_t c = 0; c < columns_.size(); ++c) print(c, columns_[c].title);
  end_line();
  rule();
  for (const auto& line : lines_) {
    if (line.empty()) {
      rule();
      continue;
    }
    for (std::size_t c = 0; c < line.size(); ++c) print(c, line[c]);
    end_line();
  }
  return out;
}

std::string fixed(double value, int digits) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, value);
  return buffer;
}

std::string as_csv(const nlohmann::ordered_json& rows) {
  std::string out;
  const auto quoted = [](const std::string& cell) {
    if (cell.find_first_of(",\"\n") == std::string::npos) return cell;
    std::string doubled = "\"";
    for (const char c : cell) doubled += c == '"' ? "\"\"" : std::string(1, c);
    return doubled + '"';
  };
  for (const auto& row : rows) {
    if (out.empty()) {
      for (const auto& [key, value] : row.items()) out += (out.empty() ? "" : ",") + key;
      out += '\n';
    }
    bool first = true;
    for (const auto& [key, value] : row.items()) {
      out += (first ? "" : ",") + (value.is_string() ? quoted(value.get<std::string>()) : value.dump());
      first = false;
    }
    out += '\n';
  }
  return out;
}

}  // namespace kvevict::tool
