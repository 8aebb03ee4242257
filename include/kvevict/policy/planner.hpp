// Planning layer by layer: scores of one layer, rows per head, selection. A whole plan is the loop over this. One
// planner for every backend: what has to be computed is asked of the one that the execution object names
// (cpu/planning.hpp, cuda/planning.cuh), and no allocator or scorer is known by name.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/concepts.hpp"
#include "kvevict/allocate/detail/row_tables.hpp"
#include "kvevict/core/audit.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/cpu/planning.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/plan/plan_options.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/select/nan_score.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Where a planner can work: the header of the backend is included.
template <class Exec>
concept PlanningExec = requires(const Exec& exec) {
  planning_on(exec);
};

// Made by Policy::make_planner(), and independent of the policy: it holds copies of the parts. Layers are given in
// order, each once, as observations or as finished scores. With a layer-wise policy, layer() answers with what that
// layer keeps before the next one exists. A global policy can only observe(); its plan is known after finish(). Keeps
// no state between two planners.
template <PlanningExec Exec, Allocator A, Scorer S, Selector K>
class LayerPlanner {
  using Backend = decltype(planning_on(std::declval<const Exec&>()));
  static_assert(Backend::template selects<K>, "this backend has no form of the selector; TopK works on all");
  static_assert(Backend::host_forms || StaticAllocator<A> || LayerAllocator<A>,
                "a global allocator ranks the scores of all layers at once, which host_exec alone does");

 public:
  // tokens: [layers * kv_heads], host memory. Throws std::invalid_argument for what cannot be planned, before any
  // layer.
  LayerPlanner(const Exec& exec, A allocator, S scorer, K selector, std::string specification, const CacheShape& shape,
               std::span<const index_t> tokens, const Budget& budget, const PlanOptions& options)
      : allocator_(std::move(allocator)),
        scorer_(std::move(scorer)),
        selector_(std::move(selector)),
        kind_(kind_of(allocator_)),
        backend_(planning_on(exec)) {
    plan_.specification = std::move(specification);
    if (!Backend::host_forms && (kind_ == AllocatorKind::global || counts_by_rule(allocator_)))
      fail_argument(plan_.specification, ": this allocator has a form on the host alone; plan with host_exec");
    check_shape(shape);
    check_options(options);
    t_.shape = shape;
    plan_.layers = shape.layers;
    plan_.heads = shape.kv_heads;
    plan_.offsets.reserve(tokens.size() + 1);
    plan_.offsets.push_back(0);
    note_heads(tokens, options);
    plan_.asked = budget.description();
    if (budget.unit() == Budget::Unit::bytes && options.row_bytes < 1)
      fail_argument("make_planner: a budget in bytes needs PlanOptions::row_bytes, bytes_per_row<element>(shape); got ",
                    options.row_bytes);
    plan_.granted = budget.resolve(t_.evictable, options.row_bytes, allocator_.minimum_rows, plan_.audit);
    check_recent(options);
    allocate();
    backend_.prepare(exec, t_, kind_ == AllocatorKind::global);
  }

  // True where layer() works: the plan of a layer needs that layer alone.
  bool layerwise() const noexcept { return kind_ != AllocatorKind::global; }
  // What the budget came to: rows of the evictable range.
  const GrantedBudget& granted() const noexcept { return plan_.granted; }

  // What the observed layer keeps, valid until the next call; on a device in its memory, and until the planner goes.
  // Throws std::domain_error naming the first head and its token for a NaN score (a device notices it in check() and
  // finish()), and std::invalid_argument where the observation is not the next layer, does not fit, lacks an input of
  // the scorer, or the policy is global.
  template <class T>
  [[nodiscard]] LayerPlan layer(const Exec& exec, const LayerObservation<T>& o) {
    check_layerwise();
    check_observation(o);
    return naming_nan(o.layer, &o,
                      [&] { return plan_layer(exec, ranks(o.layer) ? score(exec, o) : Matrix<const float>{}); });
  }

  // The same from finished scores of the next layer, [kv_heads][tokens of the longest head] or wider: an engine whose
  // ranks hold query heads of their own reduces the scores first. They are read before the call returns, or in stream
  // order. No input of the scorer is asked for; its protection holds.
  [[nodiscard]] LayerPlan layer(const Exec& exec, Matrix<const float> scores) {
    check_layerwise();
    check_scores(scores);
    return naming_nan<float>(next_layer_, nullptr, [&] { return plan_layer(exec, scores); });
  }

  // Global policies: takes the scores of the next layer. O(kv_heads * longest head) memory stays until finish().
  template <class T>
  void observe(const Exec& exec, const LayerObservation<T>& o) {
    check_global();
    check_observation(o);
    naming_nan(o.layer, &o, [&] {
      score(exec, o);
      end_observation();
    });
  }
  void observe(const Exec& exec, Matrix<const float> scores) {
    check_global();
    check_scores(scores);
    naming_nan<float>(next_layer_, nullptr, [&] {
      backend_.keep(exec, t_, next_layer_, scores);
      end_observation();
    });
  }

  // Waits for what was planned so far and throws as layer() does; does nothing where layer() already has.
  void check(const Exec& exec) { backend_.check(exec, plan_.specification, t_.shape); }

  // The whole plan in host memory, after the last layer. Waits. The planner is spent.
  [[nodiscard]] EvictionPlan finish(const Exec& exec) {
    if (next_layer_ != t_.shape.layers)
      fail_argument("finish: ", next_layer_, " of ", t_.shape.layers, " layers were planned");
    if constexpr (Backend::host_forms)
      if (kind_ == AllocatorKind::global) plan_all(exec);
    check(exec);
    backend_.collect(exec, t_, plan_);
    note_protection();
    return std::move(plan_);
  }

 private:
  // Token counts, the evictable range and protection of every head.
  void note_heads(std::span<const index_t> tokens, const PlanOptions& options) {
    const CacheShape& shape = t_.shape;
    if (std::ssize(tokens) != shape.heads_total())
      fail_argument("make_planner: ", tokens.size(), " token counts for ", shape.layers, " layers of ", shape.kv_heads,
                    " heads; one per (layer, head) is required");
    t_.protect = scorer_.protection();
    t_.comparable = heads_comparable(scorer_);
    t_.tokens.assign(tokens.begin(), tokens.end());
    std::int64_t outside = 0;
    for (const index_t t : tokens) {
      if (t < 0) fail_argument("make_planner: a head of ", t, " tokens; 0 or more is required");
      const IndexRange range = options.range(t);
      t_.evictable.push_back(range.size());
      t_.asked.push_back(protect_asked(t_.protect, t, options.recent, range));
      outside += t - range.size();
    }
    t_.protections = t_.asked;
    if (!options.whole()) {
      const std::string end = options.last == PlanOptions::no_limit ? "the end" : joined_text(options.last);
      plan_.audit.add("range: rows ", options.first, " to ", end, " may go, aligned to ", options.align, "; ", outside,
                      " rows lie outside and stay beside the budget");
    }
    if (options.recent > 0) plan_.audit.add("recent: the newest ", options.recent, " rows of every head stay");
  }

  void check_recent(const PlanOptions& options) const {
    std::int64_t recent = 0;
    for (const HeadProtect& p : t_.asked) recent += p.recent;
    if (recent > plan_.granted.total)
      fail_argument(plan_.specification, ": ", plan_.asked, " comes to ", plan_.granted.total,
                    " rows, but recent=", options.recent, " guarantees ", recent, " rows of ", t_.asked.size(),
                    " heads; ask for more");
  }

  // Rows per head, or totals per layer and how each is split.
  void allocate() {
    const CacheShape& shape = t_.shape;
    t_.splits.resize(static_cast<std::size_t>(shape.layers));
    t_.rows = t_.evictable;
    if constexpr (StaticAllocator<A>)
      if (kind_ == AllocatorKind::fixed) {
        allocator_.allocate(shape, t_.evictable, plan_.granted,
                            {t_.rows.data(), shape.layers, shape.kv_heads, shape.kv_heads}, plan_.audit);
        for (std::size_t i = 0; i < t_.rows.size(); ++i) check_rows(static_cast<std::int64_t>(i), 0);
        std::vector<std::int64_t> rows(t_.rows.begin(), t_.rows.end()), recent;
        for (const HeadProtect& p : t_.asked) recent.push_back(p.recent);
        raise_to_recent(rows, recent);
        std::copy(rows.begin(), rows.end(), t_.rows.begin());
      }
    for (std::size_t i = 0; i < t_.rows.size(); ++i) t_.rows[i] += t_.asked[i].outside();
    for (index_t l = 0; l < shape.layers; ++l) {
      const auto rows = layer_of(t_.rows, shape, l);
      t_.layer_rows.push_back(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
    }
    if constexpr (LayerAllocator<A>)
      if (kind_ == AllocatorKind::layer) split_layers();
    if constexpr (GlobalAllocator<A>)
      if (kind_ == AllocatorKind::global) all_ = allocator_.split_all(t_.all_heads(), plan_.granted.total);
  }

  void split_layers() requires LayerAllocator<A> {
    const CacheShape& shape = t_.shape;
    totals_.resize(static_cast<std::size_t>(shape.layers));
    allocator_.layer_totals(shape, t_.evictable, plan_.granted, totals_, plan_.audit);
    std::vector<std::int64_t> recent(totals_.size(), 0);
    for (std::size_t i = 0; i < t_.asked.size(); ++i)
      recent[i / static_cast<std::size_t>(shape.kv_heads)] += t_.asked[i].recent;
    raise_to_recent(totals_, recent);
    for (index_t l = 0; l < shape.layers; ++l) {
      const auto i = static_cast<std::size_t>(l);
      const SharingHeads heads = t_.heads(l);
      const std::int64_t held = std::accumulate(heads.tokens.begin(), heads.tokens.end(), std::int64_t{0});
      if (totals_[i] >= held) continue;
      t_.splits[i] = allocator_.split_layer(heads, totals_[i]);
      t_.layer_rows[i] -= held - totals_[i];
      // Selection protects no more than was set aside, so that a head which won many rows keeps them by score.
      const auto protections = layer_of(t_.protections, shape, l);
      for (std::size_t h = 0; h < protections.size(); ++h) {
        protections[h].sinks = t_.splits[i].shares[h].aside.sinks;
        protections[h].newest = t_.splits[i].shares[h].aside.newest;
      }
    }
  }

  // The guarantee of newest rows is met at the cost of the parts that have most, within the same sum.
  void raise_to_recent(std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& recent) {
    std::int64_t sum = 0, raised = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      sum += rows[i];
      raised += rows[i] < recent[i];
    }
    if (raised == 0) return;
    raise_to_minimum(rows, recent, std::max(sum, plan_.granted.total));
    plan_.audit.add("recent: ", raised, kind_ == AllocatorKind::fixed ? " heads" : " layers",
                    " were raised to the rows that are guaranteed");
  }

  // Rows that an allocator gave the head i of the table, without those outside the range.
  void check_rows(std::int64_t i, index_t lowest) const {
    const auto at = static_cast<std::size_t>(i);
    if (t_.rows[at] < lowest || t_.rows[at] > t_.evictable[at])
      fail_argument(plan_.specification, ": layer ", i / t_.shape.kv_heads, ", head ", i % t_.shape.kv_heads,
                    " was allocated ", t_.rows[at], " of ", t_.evictable[at], " rows",
                    lowest > 0 ? joined_text(", of which ", lowest, " are guaranteed") : std::string());
  }

  void check_layerwise() const {
    if (!layerwise())
      fail_argument(plan_.specification,
                    ": this allocator needs the scores of every layer, so it cannot plan layer by layer; give it all "
                    "layers with observe() and take the plan from finish()");
  }

  void check_global() const {
    if (layerwise())
      fail_argument(plan_.specification, ": this policy plans layer by layer; call layer(), which says what stays");
  }

  template <class T>
  void check_observation(const LayerObservation<T>& o) const {
    static_assert(TokenScorer<S, T, Exec>,
                  "no score_on(exec, scorer, ...) of this backend is visible: include the header with the kernel");
    const CacheShape& shape = t_.shape;
    if (o.layer != next_layer_)
      fail_argument("planner: layer ", o.layer, " given where layer ", next_layer_, " is next");
    if (!(o.shape == shape) || std::ssize(o.keys) != shape.kv_heads)
      fail_argument("planner: the observation of layer ", o.layer, " has another shape than the planner (",
                    o.shape.kv_heads, " heads against ", shape.kv_heads, ", head dimension ", o.shape.head_dim_k,
                    " against ", shape.head_dim_k, ')');
    for (index_t h = 0; h < shape.kv_heads; ++h)
      if (const index_t announced = t_.tokens[static_cast<std::size_t>(shape.at(o.layer, h))]; o.tokens(h) != announced)
        fail_argument("planner: layer ", o.layer, ", head ", h, " holds ", o.tokens(h), " tokens, but ", announced,
                      " were announced to make_planner()");
    if (const index_t rows = score_heads(scorer_, shape); rows != shape.kv_heads)
      fail_argument(plan_.specification, ": scores are per query head (", rows, " rows), but a plan is per KV head (",
                    shape.kv_heads, "); choose a group reduction (mean, max or sum)");
  }

  void check_scores(Matrix<const float> scores) const {
    if (next_layer_ >= t_.shape.layers) fail_argument("planner: all ", next_layer_, " layers have been given");
    const index_t longest = t_.longest(next_layer_);
    if (scores.rows != t_.shape.kv_heads || scores.cols < longest || scores.row_stride < scores.cols ||
        (scores.data == nullptr && longest > 0))
      fail_argument("planner: scores [", scores.rows, "][", scores.cols, "] of row stride ", scores.row_stride,
                    scores.data ? "" : " at a null pointer", " for layer ", next_layer_, "; [", t_.shape.kv_heads, "][",
                    longest, "] or wider is required");
  }

  // Whether the layer's scores are read: where every row stays there is nothing to rank.
  bool ranks(index_t layer) const { return !fills_budget<K>() || t_.evicts(layer); }

  template <class T>
  Matrix<const float> score(const Exec& exec, const LayerObservation<T>& o) {
    check_inputs(plan_.specification, needs_of(scorer_), scorer_.window_rows(), o);
    const Matrix<float> scores = backend_.score_memory(exec, t_, o.layer);
    score_on(exec, scorer_, o, scores);
    return scores;
  }

  LayerPlan plan_layer(const Exec& exec, Matrix<const float> scores) {
    const index_t l = next_layer_;
    if (t_.is_split(l)) {
      backend_.split(exec, t_, l, scores);
      if constexpr (Backend::host_forms) finish_split(l);
    }
    const LayerPlan out = backend_.select(exec, t_, l, scores, selector_, plan_);
    ++next_layer_;
    return out;
  }

  // What the host does behind a split: the allocator's own rule, and rows outside the range.
  void finish_split(index_t l) {
    const auto rows = layer_of(t_.rows, t_.shape, l);
    if constexpr (requires(Audit & audit) { allocator_.apply_rule(t_.heads(l), 0, rows, audit); })
      if (counts_by_rule(allocator_))
        allocator_.apply_rule(t_.heads(l), totals_[static_cast<std::size_t>(l)], rows, plan_.audit);
    add_outside(t_.shape.at(l, 0), t_.shape.kv_heads);
  }
  void add_outside(std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) {
      const HeadProtect& p = t_.asked[static_cast<std::size_t>(i)];
      check_rows(i, p.recent);
      t_.rows[static_cast<std::size_t>(i)] += p.outside();
    }
  }

  void end_observation() {
    if constexpr (Backend::host_forms)
      if (!layerwise()) backend_.check_ranked(t_, next_layer_, all_);
    ++next_layer_;
  }

  // A global allocator's rows, then the selection of every layer.
  void plan_all(const Exec& exec) {
    backend_.split_all(exec, t_, all_);
    add_outside(0, t_.shape.heads_total());
    for (index_t l = 0; l < t_.shape.layers; ++l)
      naming_nan<float>(l, nullptr,
                        [&] { return backend_.select(exec, t_, l, backend_.kept_scores(t_, l), selector_, plan_); });
  }

  // Runs f(); a NaN score leaves as an error that names the policy, the layer, the head, the token and, where an
  // observation tells, what made it.
  template <class T, class F>
  auto naming_nan(index_t layer, const LayerObservation<T>* o, F&& f) {
    try {
      return f();
    } catch (const NanScore& nan) {
      fail_domain(plan_.specification, ": the score of layer ", layer, ", head ", nan.row, ", token ", nan.token,
                  " is NaN", o ? Backend::cause_of_nan(*o, nan.row) : std::string());
    }
  }

  void note_protection() {
    std::int64_t cut = 0;
    index_t lowest = 0, asked_there = 0;
    for (std::size_t i = 0; i < t_.tokens.size(); ++i) {
      const index_t asked = t_.asked[i].sinks + t_.asked[i].newest;
      const index_t kept = protect_within(t_.protections[i], t_.rows[i]).count() - t_.asked[i].outside();
      if (t_.rows[i] >= t_.tokens[i] || kept >= asked) continue;
      if (cut++ == 0 || kept < lowest) {
        lowest = kept;
        asked_there = asked;
      }
    }
    if (cut > 0)
      plan_.audit.add("protection cut in ", cut, " of ", t_.tokens.size(), " heads: ", lowest, " of the ", asked_there,
                      " protected rows stay where it was cut most (protect=", word_of(t_.protect.share), ')');
  }

  A allocator_;
  S scorer_;
  [[no_unique_address]] K selector_;
  AllocatorKind kind_;
  RowTables t_;
  std::vector<std::int64_t> totals_;  // [layers], layer allocators: rows of the range
  ScoreSplit all_;                    // global allocators
  Backend backend_;
  EvictionPlan plan_;
  index_t next_layer_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI
