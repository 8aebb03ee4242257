// kvevict compare: policies on recordings, at equal totals, as a table that can be believed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/compare_rows.hpp"
#include "cli/files.hpp"
#include "cli/missing_input.hpp"
#include "cli/progress.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/metrics/finite.hpp"
#include "kvevict/metrics/metrics.hpp"

namespace kvevict::tool {
namespace {

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

// Everything about one recording that does not depend on the policy.
template <CacheElement T>
class Measure {
 public:
  Measure(const host_exec& exec, const Dump<T>& dump) : exec_(exec), dump_(dump), observations_(observe_all(dump)) {
    const auto& cache = dump_.cache();
    if (cache.continuation_len() == 0) {
      problem_ = "it records no continuation to measure with" + how_to_record(dump, Needs::none, 0, true);
      return;
    }
    const index_t layers = cache.shape().layers;
    for (index_t l = 0; l < layers; ++l) continuation_.emplace_back(cache, l);
    try {
      for (index_t l = 0; l < layers; ++l) check_finite(cache, l, asked(l), local(l));  // in order: the first is named
    } catch (const std::domain_error& e) {
      problem_ = e.what();
      return;
    }
    truth_.resize(static_cast<std::size_t>(layers));
    each_layer([&](index_t l) {
      truth_[static_cast<std::size_t>(l)] = layer_truth(host_exec{}, cache, l, asked(l), scale(), local(l));
    });
  }

  // What the policy does, or a row that says why it does nothing.
  CompareRow operator()(const NamedPolicy& named, const AskedBudget& asked) const {
    const auto& cache = dump_.cache();
    CompareRow row{dump_.name(), named.name, named.policy.specification(), asked.budget.description(), asked.retain};
    const auto tokens = detail::tokens_of(cache);
    const std::int64_t row_bytes =
        bytes_per_row<typename std::remove_cvref_t<decltype(cache)>::element_type>(cache.shape());
    Audit audit;
    const GrantedBudget granted = asked.budget.resolve(tokens, row_bytes, 0, audit);
    row.total_asked = granted.total;
    row.rows_full = granted.full;
    row.bytes_full = static_cast<std::size_t>(granted.full * row_bytes);
    const auto fails = [&](const std::string& why) {
      row.error = why;
      return row;
    };
    if (!problem_.empty()) return fails(row.dump + ": " + problem_);
    try {
      measure(named, asked.budget, row);
    } catch (const std::invalid_argument& e) {
      return fails(row.dump + ": " + e.what() +
                   how_to_record(dump_, named.policy.scorer.needs, named.policy.scorer.window_rows()));
    } catch (const std::domain_error& e) {
      return fails(row.dump + ": " + e.what());
    }
    row.equal_total = row.rows_kept == row.total_asked;
    if (!std::isfinite(row.mass_recall) || !std::isfinite(row.output_error))
      return fails(row.dump + ": the measures are no numbers; values of this size leave the range of the arithmetic");
    return row;
  }

 private:
  void measure(const NamedPolicy& named, const Budget& budget, CompareRow& row) const {
    const auto& cache = dump_.cache();
    const auto start = std::chrono::steady_clock::now();
    const EvictionPlan plan = named.policy.plan(exec_, cache, observations_, budget);
    row.plan_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    row.spec = plan.specification;
    RaggedCache<T> live(cache);
    apply(exec_, plan, live);
    row.rows_kept = plan.rows_kept();
    row.bytes_live = live.bytes_live();
    row.bytes_reserved = live.bytes_reserved();
    row.layers.resize(truth_.size());
    each_layer([&](index_t l) {
      CompareLayer& out = row.layers[static_cast<std::size_t>(l)];
      const LayerTruth& truth = truth_[static_cast<std::size_t>(l)];
      for (index_t h = 0; h < plan.heads; ++h) out.per_head.push_back(std::ssize(plan.head(l, h)));
      out.mass_recall = mass_recall(truth, plan.layer(l).keep);
      out.output_error = output_error(host_exec{}, truth, live, asked(l), scale(), local(l));
    });
    row.mass_recall = mean(row.layers, &CompareLayer::mass_recall);
    row.output_error = mean(row.layers, &CompareLayer::output_error);
    row.oracle_gap = oracle_gap(truth_, row.rows_kept, row.mass_recall);
  }

  // Layers are independent; sums run over them in order, so that threads change nothing.
  template <class Body>
  void each_layer(Body&& body) const {
    parallel_for(exec_, dump_.cache().shape().layers, [&](std::int64_t l) { body(static_cast<index_t>(l)); });
  }
  static double mean(const std::vector<CompareLayer>& layers, double CompareLayer::*value) {
    double sum = 0;
    for (const CompareLayer& l : layers) sum += l.*value;
    return sum / static_cast<double>(layers.size());
  }
  double scale() const { return dump_.info().softmax_scale; }
  AttentionQueries<T> asked(index_t l) const { return continuation_[static_cast<std::size_t>(l)].asked(); }
  LocalRows<T> local(index_t l) const { return continuation_[static_cast<std::size_t>(l)].local(); }

  host_exec exec_;
  Dump<T> dump_;
  Observations<T> observations_;
  std::string problem_;  // why nothing can be measured on this recording, or empty
  std::vector<Continuation<T>> continuation_;
  std::vector<LayerTruth> truth_;
};

// All policies that were asked for, without the bounds.
std::vector<NamedPolicy> asked_policies(const Registry& registry, PolicyOptions asked) {
  if (asked.policies.empty() && asked.allocators.empty() && asked.scorers.empty())
    for (const auto& [name, preset] : registry.presets()) asked.policies += (asked.policies.empty() ? "" : ",") + name;
  std::vector<NamedPolicy> policies = read_policies(registry, asked);
  std::erase_if(policies, [](const NamedPolicy& p) { return p.name == "full" || p.name == "oracle"; });
  for (NamedPolicy& p : policies) p = at_equal_total(registry, std::move(p));
  return policies;
}

}  // namespace

void compare(const Common& common, const CompareOptions& options) {
  std::vector<NamedPolicy> policies = asked_policies(*common.registry, options.policies);
  const std::vector<AskedBudget> budgets = read_budgets(options.budgets, compare_retains);
  // The bounds stand in every comparison, once: everything, and the best selection in hindsight.
  const bool bounds_alone = policies.empty();
  policies.insert(policies.begin(), {"oracle", common.registry->policy("oracle")});
  const NamedPolicy full{"full", common.registry->policy("full")};

  std::vector<std::string> dumps = options.dumps;
  if (dumps.empty()) dumps.push_back(shipped_data("smollm2-512").string());
  std::vector<std::string> inputs = policy_paths(policies);
  inputs.insert(inputs.end(), dumps.begin(), dumps.end());
  check_outputs({{"--out", common.out}}, inputs);
  for (const std::string& path : dumps) visit_dump(path, [](const auto&) {});  // a broken one is told before the work

  CompareReport report{{}, policy_files(policies), options.per_layer};
  Progress progress(common, dumps.size() * (1 + policies.size() * budgets.size()));
  for (const std::string& path : dumps)
    visit_dump(
        path,
        [&]<CacheElement T>(const Dump<T>& dump) {
          const Measure<T> measure(common.exec(), dump);
          report.rows.push_back(measure(full, {Budget::retain(1), 1.0}));
          progress.step(path);
          for (const AskedBudget& budget : budgets)
            for (const NamedPolicy& p : policies) {
              report.rows.push_back(measure(p, budget));
              progress.step(p.name);
            }
        },
        common.read_mode());
  progress.done();

  const auto counts = [&](const CompareRow& r) { return bounds_alone || !r.is_bound(); };
  const bool any =
      std::any_of(report.rows.begin(), report.rows.end(), [&](const auto& r) { return counts(r) && r.measured(); });
  const auto first =
      std::find_if(report.rows.begin(), report.rows.end(), [&](const auto& r) { return counts(r) && !r.measured(); });
  const std::string why = first == report.rows.end() ? "" : first->policy + ": " + first->error;
  if (dumps.size() > 1)
    for (CompareRow& mean : mean_rows(report.rows)) report.rows.push_back(std::move(mean));
  if (common.format == "json") deliver(common, compare_json(report));
  else if (common.format == "csv") deliver(common, compare_csv(report));
  else deliver(common, compare_table(report));
  if (!any) throw std::runtime_error("nothing could be measured: " + why);
}

}  // namespace kvevict::tool
