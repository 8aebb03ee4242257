#include "cli/table.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string_view>
#include <utility>

#include "kvevict/core/printable.hpp"

namespace kvevict::tool {
namespace {

// Characters of UTF-8 text.
std::size_t width_of(const std::string& cell) {
  return static_cast<std::size_t>(
      std::count_if(cell.begin(), cell.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

void Table::add(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = printable(cell);
  lines_.push_back(std::move(cells));
}

std::string Table::str() const {
  std::vector<std::size_t> width;
  for (const Column& c : columns_) width.push_back(width_of(c.title));
  for (const auto& line : lines_)
    for (std::size_t c = 0; c < line.size(); ++c) width[c] = std::max(width[c], width_of(line[c]));

  std::string out;
  const auto print = [&](std::size_t c, const std::string& cell) {
    const std::string space(width[c] - width_of(cell), ' ');
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
  const std::string out = buffer;
  return out.starts_with('-') && out.find_first_not_of("-0.") == out.npos ? out.substr(1) : out;
}

std::string as_csv(const nlohmann::ordered_json& rows) {
  std::string out;
  const auto quoted = [](const std::string& text) {
    const bool formula = !text.empty() && std::string_view("=+-@").find(text[0]) != std::string_view::npos;
    const std::string cell = (formula ? "'" : "") + printable(text);
    if (!formula && cell.find_first_of(",\"") == std::string::npos) return cell;
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
      out += first ? "" : ",";
      if (!value.is_null()) out += value.is_string() ? quoted(value.get<std::string>()) : value.dump();
      first = false;
    }
    out += '\n';
  }
  return out;
}

std::string json_text(const nlohmann::ordered_json& value) {
  return value.dump(1, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + '\n';
}

}  // namespace kvevict::tool
