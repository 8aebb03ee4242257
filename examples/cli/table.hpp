// Rows of named columns as an aligned table, csv or json.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvevict::tool {

// Text cells in columns; numbers to the right. Lines of dashes stand between groups.
class Table {
 public:
  struct Column {
    std::string title;  // with its unit
    bool number;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells) { lines_.push_back(std::move(cells)); }
  void rule() { lines_.emplace_back(); }
  std::string str() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> lines_;  // empty: a rule
};

// `digits` after the point.
std::string fixed(double value, int digits);

// One line per object with the keys of the first as header; text cells are quoted where they must be.
std::string as_csv(const nlohmann::ordered_json& rows);

}  // namespace kvevict::tool
