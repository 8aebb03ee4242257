#include "cli/compare_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/table.hpp"
#include "kvevict/core/printable.hpp"

namespace kvevict::tool {
namespace {

// The four measures with their standard errors.
constexpr std::pair<double CompareRow::*, double CompareRow::*> measures[] = {
    {&CompareRow::mass_recall, &CompareRow::mass_recall_stderr},
    {&CompareRow::output_error, &CompareRow::output_error_stderr},
    {&CompareRow::oracle_gap, &CompareRow::oracle_gap_stderr},
    {&CompareRow::plan_seconds, &CompareRow::plan_seconds_stderr}};

CompareRow mean_of(const std::vector<const CompareRow*>& all) {
  CompareRow out = *all.front();
  out.dump.clear();
  out.layers.clear();
  out.dumps = static_cast<int>(all.size());
  out.total_asked = out.rows_full = out.rows_kept = 0;
  out.bytes_full = out.bytes_live = out.bytes_reserved = 0;
  std::size_t measured = 0;
  const CompareRow* failed = nullptr;
  for (const CompareRow* r : all) {
    out.total_asked += r->total_asked;
    out.rows_full += r->rows_full;
    out.rows_kept += r->rows_kept;
    out.bytes_full += r->bytes_full;
    out.bytes_live += r->bytes_live;
    out.bytes_reserved += r->bytes_reserved;
    out.equal_total = out.equal_total && r->equal_total;
    measured += r->measured();
    if (!failed && !r->measured()) failed = r;
  }
  out.error.clear();
  if (failed) {
    out.error = "measured on " + std::to_string(measured) + " of " + std::to_string(all.size()) + " recordings; " +
                failed->error;
    return out;
  }
  const auto n = static_cast<double>(all.size());
  for (const auto& [value, error] : measures) {
    double sum = 0, squares = 0;
    for (const CompareRow* r : all) sum += r->*value;
    const double mean = sum / n;
    for (const CompareRow* r : all) squares += (r->*value - mean) * (r->*value - mean);
    out.*value = mean;
    out.*error = all.size() > 1 ? std::sqrt(squares / (n - 1) / n) : 0.0;
  }
  return out;
}

nlohmann::ordered_json as_json(const CompareRow& r) {
  using json = nlohmann::ordered_json;
  const auto measure = [&](const auto& value) { return r.measured() ? json(value) : json(); };
  const auto error = [&](double value) { return r.measured() && r.dumps > 1 ? json(value) : json(); };
  return {{"dump", r.dump.empty() ? json() : json(r.dump)},
          {"policy", r.policy},
          {"spec", r.spec},
          {"retain", r.retain ? json(*r.retain) : json()},
          {"rows_full", r.rows_full},
          {"rows_kept", measure(r.rows_kept)},
          {"bytes_full", r.bytes_full},
          {"bytes_live", measure(r.bytes_live)},
          {"bytes_reserved", measure(r.bytes_reserved)},
          {"mass_recall", measure(r.mass_recall)},
          {"output_error", measure(r.output_error)},
          {"oracle_gap", measure(r.oracle_gap)},
          {"plan_seconds", measure(r.plan_seconds)},
          {"budget", r.budget},
          {"total_asked", r.total_asked},
          {"error", r.measured() ? json() : json(r.error)},
          {"dumps", r.dumps},
          {"mass_recall_stderr", error(r.mass_recall_stderr)},
          {"output_error_stderr", error(r.output_error_stderr)},
          {"oracle_gap_stderr", error(r.oracle_gap_stderr)},
          {"plan_seconds_stderr", error(r.plan_seconds_stderr)}};
}

std::int64_t rows_of(const CompareLayer& layer) {
  std::int64_t sum = 0;
  for (const auto n : layer.per_head) sum += n;
  return sum;
}

nlohmann::ordered_json layers_of(const CompareRow& r) {
  if (r.layers.empty()) return {};
  auto out = nlohmann::ordered_json::array();
  for (std::size_t l = 0; l < r.layers.size(); ++l)
    out.push_back({{"layer", l},
                   {"rows_kept", rows_of(r.layers[l])},
                   {"per_head", r.layers[l].per_head},
                   {"mass_recall", r.layers[l].mass_recall},
                   {"output_error", r.layers[l].output_error}});
  return out;
}

std::string joined(const std::vector<std::int64_t>& numbers) {
  std::string out;
  for (const auto n : numbers) out += (out.empty() ? "" : " ") + std::to_string(n);
  return out;
}

std::string budget_cell(const CompareRow& r, bool ratios) { return ratios ? fixed(*r.retain, 3) : r.budget; }

// One recording, or the means: the full cache, then per budget the oracle and the policies by mass recall. The best
// policy of a budget is marked in each column that says how good the selection is.
class Section {
 public:
  Section(std::vector<CompareRow> rows, bool ratios) : rows_(std::move(rows)), ratios_(ratios) {
    for (const CompareRow& r : rows_) unequal_ = unequal_ || (r.measured() && !r.equal_total);
  }

  std::string str() const {
    Table table({{"policy", false},
                 {ratios_ ? "retain" : "budget", ratios_},
                 {"rows kept", true},
                 {"live MiB", true},
                 {"reserved MiB", true},
                 {"mass recall", true},
                 {"output error", true},
                 {"oracle gap", true},
                 {"plan ms", true}});
    std::vector<std::vector<CompareRow>> groups;
    for (const CompareRow& r : rows_) {
      const auto same = [&](const auto& g) { return g.front().budget == r.budget && g.front().policy != "full"; };
      const auto group = std::find_if(groups.begin(), groups.end(), same);
      if (group == groups.end() || r.policy == "full") groups.push_back({r});
      else group->push_back(r);
    }
    for (auto& group : groups) {
      std::stable_sort(group.begin(), group.end(), [](const CompareRow& a, const CompareRow& b) {
        if (a.is_bound() != b.is_bound()) return a.is_bound();
        if (a.measured() != b.measured()) return a.measured();
        return a.measured() && a.mass_recall > b.mass_recall;
      });
      if (&group != &groups.front()) table.rule();
      add(group, table);
    }
    std::string out = heading() + table.str() +
                      "* best of those that keep as many rows as asked for, the oracle (which looks at the "
                      "continuation) left out\n";
    if (unequal_) out += "# cannot keep the " + asked() + " rows that were asked for: measured, but not ranked\n";
    return out + errors();
  }

 private:
  std::string heading() const {
    const CompareRow& first = rows_.front();
    const std::string what = first.dump.empty()
                                 ? "mean of " + std::to_string(first.dumps) + " recordings \u00b1 its standard error"
                                 : printable(first.dump);
    return what + ": " + std::to_string(first.rows_full) + " rows, " + mib(first.bytes_full) +
           " MiB of keys and values" + (first.dump.empty() ? " in all" : "") + '\n';
  }

  // The totals of those budgets at which a policy missed its own.
  std::string asked() const {
    std::vector<std::string> totals;
    for (const CompareRow& r : rows_)
      if (r.measured() && !r.equal_total)
        if (const auto n = std::to_string(r.total_asked); std::find(totals.begin(), totals.end(), n) == totals.end())
          totals.push_back(n);
    std::string out;
    for (const auto& n : totals) out += (out.empty() ? "" : ", ") + n;
    return out;
  }

  void add(const std::vector<CompareRow>& group, Table& table) const {
    constexpr double worst = std::numeric_limits<double>::infinity();
    double recall = -worst, error = worst, gap = worst;
    for (const CompareRow& r : group)
      if (ranked(r)) {
        recall = std::max(recall, r.mass_recall);
        error = std::min(error, r.output_error);
        gap = std::min(gap, r.oracle_gap);
      }
    for (const CompareRow& r : group) {
      if (!r.measured()) {
        table.add({r.policy, budget_cell(r, ratios_), "-", "-", "-", "-  ", "-  ", "-  ", "-"});
        continue;
      }
      const auto cell = [&](double value, double deviation, double best) {
        return fixed(value, 4) + (r.dumps > 1 ? " \u00b1 " + fixed(deviation, 4) : "") +
               (ranked(r) && value == best ? " *" : "  ");
      };
      table.add({r.policy, budget_cell(r, ratios_),
                 std::to_string(r.rows_kept) + (!unequal_       ? ""
                                                : r.equal_total ? "  "
                                                                : " #"),
                 mib(r.bytes_live), mib(r.bytes_reserved), cell(r.mass_recall, r.mass_recall_stderr, recall),
                 cell(r.output_error, r.output_error_stderr, error), cell(r.oracle_gap, r.oracle_gap_stderr, gap),
                 fixed(r.plan_seconds * 1e3, 2)});
    }
  }

  // Each complaint once, with the policies that it stops.
  std::string errors() const {
    std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
    for (const CompareRow& r : rows_) {
      if (r.measured()) continue;
      auto reason = std::find_if(reasons.begin(), reasons.end(), [&](const auto& x) { return x.first == r.error; });
      if (reason == reasons.end()) reason = reasons.insert(reasons.end(), {r.error, {}});
      auto& names = reason->second;
      if (std::find(names.begin(), names.end(), r.policy) == names.end()) names.push_back(r.policy);
    }
    std::string out;
    for (const auto& [error, names] : reasons) {
      std::string list;
      for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
      out += printable("not measured: " + list + ": " + error) + '\n';
    }
    return out;
  }

  static bool ranked(const CompareRow& r) { return r.measured() && r.equal_total && !r.is_bound(); }
  static std::string mib(std::size_t bytes) { return fixed(static_cast<double>(bytes) / (1024 * 1024), 2); }

  std::vector<CompareRow> rows_;
  bool ratios_, unequal_ = false;
};

std::string layer_tables(const std::vector<CompareRow>& rows, bool ratios) {
  std::string out;
  for (const CompareRow& r : rows) {
    if (r.layers.empty()) continue;
    out += '\n' + printable(r.policy) + (ratios ? " at retain " : ", ") + budget_cell(r, ratios) + " on " +
           printable(r.dump) + '\n';
    Table table(
        {{"layer", true}, {"rows kept", true}, {"mass recall", true}, {"output error", true}, {"per head", false}});
    for (std::size_t l = 0; l < r.layers.size(); ++l)
      table.add({std::to_string(l), std::to_string(rows_of(r.layers[l])), fixed(r.layers[l].mass_recall, 4),
                 fixed(r.layers[l].output_error, 4), joined(r.layers[l].per_head)});
    out += table.str();
  }
  return out;
}

}  // namespace

std::vector<CompareRow> mean_rows(const std::vector<CompareRow>& rows) {
  std::vector<std::pair<std::pair<std::string, std::string>, std::vector<const CompareRow*>>> groups;
  for (const CompareRow& r : rows) {
    const std::pair key{r.policy, r.budget};
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == key; });
    if (group == groups.end()) group = groups.insert(groups.end(), {key, {}});
    group->second.push_back(&r);
  }
  std::vector<CompareRow> out;
  for (const auto& [key, all] : groups) out.push_back(mean_of(all));
  return out;
}

std::string compare_table(const CompareReport& report) {
  const auto& rows = report.rows;
  const bool ratios = std::all_of(rows.begin(), rows.end(), [](const CompareRow& r) { return r.retain.has_value(); });
  std::string out;
  for (std::size_t first = 0, end = 0; first < rows.size(); first = end) {
    while (end < rows.size() && rows[end].dump == rows[first].dump) ++end;
    const std::vector<CompareRow> section(rows.begin() + static_cast<std::ptrdiff_t>(first),
                                          rows.begin() + static_cast<std::ptrdiff_t>(end));
    out += (out.empty() ? "" : "\n") + Section(section, ratios).str();
    if (report.per_layer) out += layer_tables(section, ratios);
  }
  return out;
}

std::string compare_csv(const CompareReport& report) {
  auto rows = nlohmann::ordered_json::array();
  for (const CompareRow& r : report.rows) {
    if (!report.per_layer) {
      rows.push_back(as_json(r));
      continue;
    }
    for (std::size_t l = 0; l < r.layers.size(); ++l)
      rows.push_back({{"dump", r.dump},
                      {"policy", r.policy},
                      {"spec", r.spec},
                      {"budget", r.budget},
                      {"layer", l},
                      {"rows_kept", rows_of(r.layers[l])},
                      {"per_head", joined(r.layers[l].per_head)},
                      {"mass_recall", r.layers[l].mass_recall},
                      {"output_error", r.layers[l].output_error}});
  }
  return as_csv(rows);
}

std::string compare_json(const CompareReport& report) {
  auto rows = nlohmann::ordered_json::array();
  for (const CompareRow& r : report.rows) {
    auto row = as_json(r);
    row["layers"] = layers_of(r);
    rows.push_back(std::move(row));
  }
  return json_text({{"format", "kvevict-compare"}, {"version", 2}, {"files", report.files}, {"rows", rows}});
}

}  // namespace kvevict::tool
