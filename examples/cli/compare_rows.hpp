// What `compare` says: one row per recording, policy and budget, and how rows become a table, csv or json.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace kvevict::tool {

struct CompareLayer {
  std::vector<std::int64_t> per_head;  // rows kept
  double mass_recall = 0, output_error = 0;
};

struct CompareRow {
  std::string dump;    // empty: the mean over all recordings
  std::string policy;  // as asked
  std::string spec;    // as run
  std::string budget;  // in words
  std::optional<double> retain;
  std::string error{};  // why there are no measures, or empty
  std::int64_t total_asked = 0, rows_full = 0, rows_kept = 0;
  std::size_t bytes_full = 0, bytes_live = 0, bytes_reserved = 0;
  double mass_recall = 0, output_error = 0, oracle_gap = 0, plan_seconds = 0;
  double mass_recall_stderr = 0, output_error_stderr = 0, oracle_gap_stderr = 0, plan_seconds_stderr = 0;
  int dumps = 1;                       // recordings behind the measures; with one there is no standard error
  bool equal_total = true;             // kept what was asked for, in every recording
  std::vector<CompareLayer> layers{};  // of one recording

  bool measured() const { return error.empty(); }
  bool is_bound() const { return policy == "full" || policy == "oracle"; }
};

// One row per policy and budget over all recordings, in the order of the first recording: measures are means, counts
// are sums. A policy that was not measured on each of them has no mean.
std::vector<CompareRow> mean_rows(const std::vector<CompareRow>& rows);

struct CompareReport {
  std::vector<CompareRow> rows;              // by recording; then the means, where there are several
  std::map<std::string, std::string> files;  // what policies read: texts and digests
  bool per_layer = false;
};
std::string compare_table(const CompareReport& report);
std::string compare_csv(const CompareReport& report);
std::string compare_json(const CompareReport& report);

}  // namespace kvevict::tool
