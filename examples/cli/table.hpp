// Rows of named columns as an aligned table, csv or json.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvevict::tool {

// Text cells in columns; numbers to the right. Lines of dashes stand between groups. Cells are shown as printable text.
class Table {
 public:
  struct Column {
    std::string title;  // with its unit
    bool number;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  void rule() { lines_.emplace_back(); }
  std::string str() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> lines_;  // empty: a rule
};

// `digits` after the point; what rounds to zero has no sign.
std::string fixed(double value, int digits);

// One line per object with the keys of the first as header; null is an empty cell. Texts are printable, quoted where
// they must be, and led by an apostrophe where a spreadsheet would take them for a formula.
std::string as_csv(const nlohmann::ordered_json& rows);

// With a line end, in ASCII: nothing in it can act on a terminal.
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace kvevict::tool
