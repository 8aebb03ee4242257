// kvevict compare: policies on recorded dumps, as a table that can be believed.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/progress.hpp"
#include "cli/table.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/metrics/metrics.hpp"

namespace kvevict::tool {
namespace {

struct Row {
  std::string dump, policy, spec;
  double retain = 1;
  std::int64_t rows_full = 0, rows_kept = 0;
  std::size_t bytes_full = 0, bytes_live = 0, bytes_reserved = 0;
  double mass_recall = 0, output_error = 0, oracle_gap = 0, plan_seconds = 0;
};

// Continuation queries and rows of one layer, as the metrics take them.
template <CacheElement T>
struct Continuation {
  std::vector<Rows<const T>> keys, values, queries;
  std::span<const index_t> positions;

  Continuation(const RecordedCache<T>& cache, index_t layer) : positions(cache.continuation_positions()) {
    for (index_t h = 0; h < cache.shape().kv_heads; ++h) {
      keys.push_back(cache.continuation_keys(layer, h));
      values.push_back(cache.continuation_values(layer, h));
    }
    for (index_t h = 0; h < cache.shape().q_heads; ++h) queries.push_back(cache.continuation_queries(layer, h));
  }
  AttentionQueries<T> asked() const { return {queries, positions}; }
  LocalRows<T> local() const { return {keys, values, positions}; }
};

// Everything about one dump that does not depend on the policy.
template <CacheElement T>
class Measure {
 public:
  Measure(const host_exec& exec, const Dump<T>& dump) : exec_(exec), dump_(dump), observations_(observe_all(dump)) {
    const auto& cache = dump_.cache();
    if (cache.continuation_len() == 0)
      fail_format(dump.name(), ": records no continuation; compare needs one to measure with");
    const index_t layers = cache.shape().layers;
    for (index_t l = 0; l < layers; ++l) continuation_.emplace_back(cache, l);
    truth_.resize(static_cast<std::size_t>(layers));
    each_layer([&](std::size_t l) {
      truth_[l] = layer_truth(host_exec{}, cache, static_cast<index_t>(l), continuation_[l].asked(),
                              dump.info().softmax_scale, continuation_[l].local());
    });
  }

  Row operator()(const NamedPolicy& named, double retain) const {
    const auto& cache = dump_.cache();
    const auto start = std::chrono::steady_clock::now();
    const EvictionPlan plan = named.policy.plan(exec_, cache, observations_, Budget::retain(retain));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

    RaggedCache<T> live(cache);
    Row row{dump_.name(), named.name, plan.specification, retain};
    row.bytes_full = live.bytes_live();
    apply(exec_, plan, live);
    row.rows_full = plan.granted.full;
    row.rows_kept = plan.rows_kept();
    row.bytes_live = live.bytes_live();
    row.bytes_reserved = live.bytes_reserved();
    row.plan_seconds = seconds.count();
    std::vector<double> recall(truth_.size()), error(truth_.size());
    each_layer([&](std::size_t l) {
      recall[l] = mass_recall(truth_[l], plan.layer(static_cast<index_t>(l)).keep);
      error[l] = output_error(host_exec{}, truth_[l], live, continuation_[l].asked(), dump_.info().softmax_scale,
                              continuation_[l].local());
    });
    row.mass_recall = mean(recall);
    row.output_error = mean(error);
    row.oracle_gap = oracle_gap(truth_, plan.granted.total, row.mass_recall);
    return row;
  }

 private:
  // Layers are independent; sums run over them in order, so that threads change nothing.
  template <class Body>
  void each_layer(Body&& body) const {
    parallel_for(exec_, dump_.cache().shape().layers, [&](std::int64_t l) { body(static_cast<std::size_t>(l)); });
  }
  static double mean(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }

  host_exec exec_;
  Dump<T> dump_;
  Observations<T> observations_;
  std::vector<Continuation<T>> continuation_;
  std::vector<LayerTruth> truth_;
};

nlohmann::ordered_json as_json(const std::vector<Row>& rows) {
  auto out = nlohmann::ordered_json::array();
  for (const Row& r : rows)
    out.push_back({{"dump", r.dump},
                   {"policy", r.policy},
                   {"spec", r.spec},
                   {"retain", r.retain},
                   {"rows_full", r.rows_full},
                   {"rows_kept", r.rows_kept},
                   {"bytes_full", r.bytes_full},
                   {"bytes_live", r.bytes_live},
                   {"bytes_reserved", r.bytes_reserved},
                   {"mass_recall", r.mass_recall},
                   {"output_error", r.output_error},
                   {"oracle_gap", r.oracle_gap},
                   {"plan_seconds", r.plan_seconds}});
  return out;
}

bool is_bound(const Row& r) { return r.policy == "full" || r.policy == "oracle"; }

// One table a dump: the full cache, then per ratio the oracle and the policies by mass_recall. The best policy of a
// ratio is marked in each column that says how good the selection is.
std::string as_table(const std::vector<Row>& rows) {
  std::string out;
  for (std::size_t first = 0; first < rows.size();) {
    std::size_t end = first;
    while (end < rows.size() && rows[end].dump == rows[first].dump) ++end;
    Table table({{"policy", false},
                 {"retain", true},
                 {"rows kept", true},
                 {"live MiB", true},
                 {"reserved MiB", true},
                 {"mass recall", true},
                 {"output error", true},
                 {"oracle gap", true},
                 {"plan ms", true}});
    std::map<double, std::vector<Row>> by_retain;
    for (std::size_t i = first; i < end; ++i)
      by_retain[rows[i].policy == "full" ? 0 : rows[i].retain].push_back(rows[i]);
    for (auto& [retain, group] : by_retain) {
      std::stable_sort(group.begin(), group.end(), [](const Row& a, const Row& b) {
        return is_bound(a) != is_bound(b) ? is_bound(a) : a.mass_recall > b.mass_recall;
      });
      double recall = -1, error = 1e300, gap = 1e300;
      for (const Row& r : group)
        if (!is_bound(r)) {
          recall = std::max(recall, r.mass_recall);
          error = std::min(error, r.output_error);
          gap = std::min(gap, r.oracle_gap);
        }
      const auto cell = [](const Row& r, double value, double best) {
        return fixed(value, 4) + (!is_bound(r) && value == best ? " *" : "  ");
      };
      constexpr double mib = 1024 * 1024;
      if (retain > 0) table.rule();
      for (const Row& r : group)
        table.add({r.policy, fixed(r.retain, 3), std::to_string(r.rows_kept),
                   fixed(static_cast<double>(r.bytes_live) / mib, 2),
                   fixed(static_cast<double>(r.bytes_reserved) / mib, 2), cell(r, r.mass_recall, recall),
                   cell(r, r.output_error, error), cell(r, r.oracle_gap, gap), fixed(r.plan_seconds * 1e3, 2)});
    }
    out += (out.empty() ? "" : "\n") + rows[first].dump + ": " + std::to_string(rows[first].rows_full) + " rows, " +
           fixed(static_cast<double>(rows[first].bytes_full) / (1024 * 1024), 2) + " MiB of keys and values\n" +
           table.str() + "* best of the ratio, the oracle (which looks at the continuation) left out\n";
    first = end;
  }
  return out;
}

}  // namespace

void compare(const Common& common, const CompareOptions& options) {
  PolicyOptions asked = options.policies;
  const bool everything = asked.policies.empty() && asked.allocators.empty() && asked.scorers.empty();
  if (everything)
    for (const auto& [name, preset] : common.registry->presets())
      asked.policies += (asked.policies.empty() ? "" : ",") + name;
  std::vector<NamedPolicy> policies = read_policies(*common.registry, asked);
  const std::vector<double> retains = read_retains(options.retains);

  // The bounds stand in every comparison, once: everything, and the best selection in hindsight.
  const auto is_named = [](const char* name) { return [name](const NamedPolicy& p) { return p.name == name; }; };
  std::erase_if(policies, is_named("full"));
  std::erase_if(policies, is_named("oracle"));
  policies.insert(policies.begin(), {"oracle", common.registry->policy("oracle")});
  const NamedPolicy full{"full", common.registry->policy("full")};

  std::vector<std::string> dumps = options.dumps;
  if (dumps.empty()) dumps.push_back(shipped_data("smollm2-512.safetensors").string());
  std::vector<Row> rows;
  Progress progress(common, dumps.size() * (1 + policies.size() * retains.size()));
  for (const std::string& path : dumps)
    visit_dump(path, [&]<CacheElement T>(const Dump<T>& dump) {
      const Measure<T> measure(common.exec(), dump);
      rows.push_back(measure(full, 1));
      progress.step(path);
      for (const double retain : retains)
        for (const NamedPolicy& p : policies) {
          try {
            rows.push_back(measure(p, retain));
          } catch (const std::invalid_argument& reason) {
            // Not every dump has what every policy needs; that is an error only for policies that were asked for.
            if (!everything) throw;
            if (retain == retains.front() && !common.quiet)
              *common.errors << "kvevict: note: " << p.name << " left out: " << reason.what() << '\n';
          }
          progress.step(p.name);
        }
    });
  progress.done();

  const auto json = as_json(rows);
  if (common.format == "json")
    deliver(common,
            nlohmann::ordered_json{{"format", "kvevict-compare"}, {"version", 1}, {"rows", json}}.dump(1) + '\n');
  else if (common.format == "csv") deliver(common, as_csv(json));
  else deliver(common, as_table(rows));
}

}  // namespace kvevict::tool
