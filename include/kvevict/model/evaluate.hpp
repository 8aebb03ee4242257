// What a policy costs: how far the predictions of a model move after its cache was cut. A context is compressed before
// any question is known; every probe and the continuation then start from that same compressed cache, and are compared
// with the full one, token by token. The prefill and the pass over the full cache run once per context, whatever the
// number of policies and budgets.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/concepts.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/capture.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/observed_prefill.hpp"
#include "kvevict/model/packed.hpp"
#include "kvevict/plan/plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct EvaluationLimits {
  index_t probes = 0;        // most probes of a context; 0: every one that the full cache answers
  index_t continuation = 0;  // tokens of the continuation that take part, 2 or more; 0: all
};

// One context under one policy and budget. Divergences, KL(full || evicted), and negative log likelihoods are in nats.
struct ContextResult {
  index_t probes = 0, probes_right = 0;  // of those that the full cache answers
  double kl_answers = 0;                 // sum over probes of the mean over the tokens of the answer
  double kl_continuation = 0;            // mean over scored tokens
  double nll_continuation = 0, nll_continuation_full = 0;
  std::int64_t rows_full = 0, rows_kept = 0;
  std::int64_t rows_peak = 0;  // that a prefill evicting layer by layer would hold at once
  double seconds = 0;          // planning, eviction and the pass over the evicted cache

  friend bool operator==(const ContextResult&, const ContextResult&) = default;
};

// Many contexts: means over probes or contexts, shares of rows, the sum of seconds. NaN where there was nothing.
struct EvaluationResult {
  std::int64_t contexts = 0, probes = 0;
  double kl_answer = 0, kl_continuation = 0, nll_continuation = 0, nll_continuation_full = 0, accuracy = 0;
  double rows_kept_fraction = 0, peak_rows_fraction = 0, seconds = 0;
};

inline EvaluationResult summarise(std::span<const ContextResult> results) {
  EvaluationResult out;
  std::int64_t right = 0, full = 0, kept = 0, peak = 0;
  for (const ContextResult& r : results) {
    ++out.contexts;
    out.probes += r.probes;
    right += r.probes_right;
    out.kl_answer += r.kl_answers;
    out.kl_continuation += r.kl_continuation;
    out.nll_continuation += r.nll_continuation;
    out.nll_continuation_full += r.nll_continuation_full;
    full += r.rows_full;
    kept += r.rows_kept;
    peak += r.rows_peak;
    out.seconds += r.seconds;
  }
  const auto contexts = static_cast<double>(out.contexts), probes = static_cast<double>(out.probes);
  out.kl_answer /= probes;
  out.accuracy = static_cast<double>(right) / probes;
  out.kl_continuation /= contexts;
  out.nll_continuation /= contexts;
  out.nll_continuation_full /= contexts;
  out.rows_kept_fraction = static_cast<double>(kept) / static_cast<double>(full);
  out.peak_rows_fraction = static_cast<double>(peak) / static_cast<double>(full);
  return out;
}

// Most rows held at once by a prefill that carries the plan out layer by layer: what earlier layers keep and the whole
// of the present one. tokens: rows per head before eviction.
inline std::int64_t layerwise_peak(const EvictionPlan& plan, index_t tokens) {
  std::int64_t peak = 0;
  for (index_t l = 0; l < plan.layers; ++l)
    peak = std::max(peak, plan.offsets[static_cast<std::size_t>(l) * static_cast<std::size_t>(plan.heads)] +
                              std::int64_t{plan.heads} * tokens);
  return peak;
}

namespace detail {

// log(sum(exp(x))) in double precision.
inline double log_sum_exp(std::span<const float> x) {
  const auto top = static_cast<double>(*std::max_element(x.begin(), x.end()));
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v) - top);
  return top + std::log(sum);
}

// KL(softmax(p) || softmax(q)) for logits and their log-sum-exps.
inline double divergence(std::span<const float> p, double p_sum, std::span<const float> q, double q_sum) {
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const auto a = static_cast<double>(p[i]);
    sum += std::exp(a - p_sum) * (a - static_cast<double>(q[i]));
  }
  return sum - p_sum + q_sum;
}

// Token sequences that start from one cache, and the places where one of their tokens is predicted.
class ScoredBranches {
 public:
  // The first `given` tokens are fed unscored; each of the others is predicted by its predecessor.
  void add(std::span<const index_t> given, std::span<const index_t> scored) {
    tokens_.insert(tokens_.end(), given.begin(), given.end());
    rows_.push_back(static_cast<index_t>(tokens_.size()) - 1);
    tokens_.insert(tokens_.end(), scored.begin(), scored.end() - 1);  // nothing follows the last
    while (rows_.size() < targets_.size() + scored.size()) rows_.push_back(rows_.back() + 1);
    targets_.insert(targets_.end(), scored.begin(), scored.end());
    offsets_.push_back(static_cast<index_t>(tokens_.size()));
    scores_.push_back(targets_.size());
  }
  Branches branches() const noexcept { return {tokens_, offsets_}; }
  std::span<const index_t> rows() const noexcept { return rows_; }        // of the pass, [scored tokens]
  std::span<const index_t> targets() const noexcept { return targets_; }  // [scored tokens]
  // Branch b's scored tokens are [first(b), first(b + 1)).
  std::size_t first(std::size_t b) const { return scores_[b]; }

 private:
  std::vector<index_t> tokens_, rows_, targets_, offsets_{0};
  std::vector<std::size_t> scores_{0};
};

// Logits at every scored place, with their log-sum-exps and best tokens.
struct Predictions {
  index_t vocabulary = 0;
  FloatBuffer logits;  // [scored tokens][vocabulary]
  std::vector<double> log_sums;
  std::vector<index_t> best;  // ties: the lowest

  std::span<const float> row(std::size_t i) const {
    const auto v = static_cast<std::size_t>(vocabulary);
    return {logits.data() + i * v, v};
  }
  double nll(std::size_t i, index_t token) const {
    return log_sums[i] - static_cast<double>(row(i)[static_cast<std::size_t>(token)]);
  }

  template <KVCacheView Cache>
  void predict(const host_exec& exec, const Decoder& decoder, const ScoredBranches& asked, index_t next_position,
               const Cache& cache, ForwardState& state) {
    vocabulary = decoder.config().vocabulary;
    const std::size_t n = asked.rows().size();
    decoder.feed_branches(exec, asked.branches(), next_position, cache, state);
    logits.resize(n * static_cast<std::size_t>(vocabulary));
    decoder.logits(exec, state, asked.rows(), {logits.data(), static_cast<index_t>(n), vocabulary, vocabulary});
    log_sums.resize(n);
    best.resize(n);
    parallel_for(exec, std::ssize(log_sums), [&](std::int64_t item) {
      const auto i = static_cast<std::size_t>(item);
      const auto x = row(i);
      log_sums[i] = log_sum_exp(x);
      best[i] = static_cast<index_t>(std::max_element(x.begin(), x.end()) - x.begin());
    });
  }
};

}  // namespace detail

// One context, prefilled and asked with the full cache; then asked again under any number of policies and budgets.
class ContextEvaluation {
 public:
  // `capture`: what the policies to come need. Throws format_error for a context that, with its probes or its
  // continuation, goes beyond the model's positions, std::invalid_argument for impossible limits.
  ContextEvaluation(const host_exec& exec, const Decoder& decoder, const Tasks& tasks, index_t context,
                    const CaptureOptions& capture, const EvaluationLimits& limits)
      : exec_(exec),
        decoder_(decoder),
        tokens_(static_cast<index_t>(tasks.context(context).size())),
        continuation_(checked_continuation(tasks, context, limits)),
        candidates_(candidates(tasks, context, limits)),
        prefill_(exec, decoder, checked_context(decoder, tasks, context), capture, state_) {
    detail::ScoredBranches asked;
    for (const Probe& p : candidates_) asked.add(p.question, p.answer);
    asked.add(continuation_.first(1), continuation_.subspan(1));
    full_.predict(exec_, decoder_, asked, tokens_, prefill_.cache(), state_);

    // Only what the full cache answers can be lost by eviction.
    const auto take = [&](std::size_t branch, std::span<const index_t> given, std::span<const index_t> scored) {
      asked_.add(given, scored);
      for (std::size_t i = asked.first(branch); i < asked.first(branch + 1); ++i) full_index_.push_back(i);
    };
    for (std::size_t b = 0; b < candidates_.size(); ++b) {
      const Probe& p = candidates_[b];
      if (limits.probes > 0 && probes_ == limits.probes) break;
      if (p.full == Probe::FullCache::unchecked &&
          !std::equal(p.answer.begin(), p.answer.end(),
                      full_.best.begin() + static_cast<std::ptrdiff_t>(asked.first(b))))
        continue;
      take(b, p.question, p.answer);
      ++probes_;
    }
    take(candidates_.size(), continuation_.first(1), continuation_.subspan(1));
  }

  // Throws as the policy's planner does.
  template <class P>
  ContextResult operator()(const P& policy, const Budget& budget) {
    const auto start = std::chrono::steady_clock::now();
    ContextResult out;
    const EvictionPlan plan = policy.plan(exec_, prefill_.cache(), prefill_.observations(), budget);
    out.rows_full = plan.granted.full;
    out.rows_kept = plan.rows_kept();
    out.rows_peak = policy.layerwise() ? layerwise_peak(plan, tokens_) : out.rows_full;
    RaggedCache<float> cache(prefill_.cache());
    apply(exec_, plan, cache);
    evicted_.predict(exec_, decoder_, asked_, tokens_, cache, state_);
    compare(out);
    out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return out;
  }

  index_t probes() const noexcept { return probes_; }
  const ObservedPrefill& prefill() const noexcept { return prefill_; }

 private:
  static std::span<const index_t> checked_continuation(const Tasks& tasks, index_t context,
                                                       const EvaluationLimits& limits) {
    if (limits.probes < 0 || limits.continuation < 0 || limits.continuation == 1)
      fail_argument("evaluation: ", limits.probes, " probes and ", limits.continuation,
                    " continuation tokens; 0 stands for all, and 2 tokens or more are required");
    const auto all = tasks.continuation(context);
    return limits.continuation == 0 ? all
                                    : all.first(std::min(all.size(), static_cast<std::size_t>(limits.continuation)));
  }

  // Probes that the full cache answers or may answer, as many as are certainly enough.
  static std::vector<Probe> candidates(const Tasks& tasks, index_t context, const EvaluationLimits& limits) {
    std::vector<Probe> out;
    index_t sure = 0;
    for (const Probe& p : tasks.probes(context)) {
      if (limits.probes > 0 && sure == limits.probes) break;
      if (p.full == Probe::FullCache::fails) continue;
      sure += p.full == Probe::FullCache::answers;
      out.push_back(p);
    }
    return out;
  }

  std::span<const index_t> checked_context(const Decoder& decoder, const Tasks& tasks, index_t context) const {
    std::size_t longest = continuation_.size();
    for (const Probe& p : candidates_) longest = std::max(longest, p.question.size() + p.answer.size());
    const auto positions = tokens_ + static_cast<std::int64_t>(longest) - 1;  // the last token is not fed
    if (positions > decoder.config().most_positions)
      fail_format(tasks.name(), ": context ", context, " has ", tokens_, " tokens and takes ", positions,
                  " positions with what follows it; the model was made for ", decoder.config().most_positions,
                  " (max_position_embeddings)");
    return tasks.context(context);
  }

  void compare(ContextResult& out) const {
    const std::size_t n = full_index_.size();
    std::vector<double> kl(n);
    parallel_for(exec_, static_cast<std::int64_t>(n), [&](std::int64_t item) {
      const auto i = static_cast<std::size_t>(item), f = full_index_[i];
      kl[i] = detail::divergence(full_.row(f), full_.log_sums[f], evicted_.row(i), evicted_.log_sums[i]);
    });
    out.probes = probes_;
    for (std::size_t b = 0; b < static_cast<std::size_t>(probes_); ++b) {
      const std::size_t first = asked_.first(b), end = asked_.first(b + 1);
      double sum = 0;
      bool right = true;
      for (std::size_t i = first; i < end; ++i) {
        sum += kl[i];
        right = right && evicted_.best[i] == asked_.targets()[i];
      }
      out.kl_answers += sum / static_cast<double>(end - first);
      out.probes_right += right;
    }
    const std::size_t first = asked_.first(static_cast<std::size_t>(probes_));
    for (std::size_t i = first; i < n; ++i) {
      out.kl_continuation += kl[i];
      out.nll_continuation += evicted_.nll(i, asked_.targets()[i]);
      out.nll_continuation_full += full_.nll(full_index_[i], asked_.targets()[i]);
    }
    const auto count = static_cast<double>(n - first);
    out.kl_continuation /= count;
    out.nll_continuation /= count;
    out.nll_continuation_full /= count;
  }

  host_exec exec_;
  const Decoder& decoder_;
  index_t tokens_, probes_ = 0;
  std::span<const index_t> continuation_;
  std::vector<Probe> candidates_;
  ForwardState state_;
  ObservedPrefill prefill_;
  detail::ScoredBranches asked_;
  std::vector<std::size_t> full_index_;  // place in full_ of each scored token of asked_
  detail::Predictions full_, evicted_;
};

}  // namespace kvevict::inline KVEVICT_ABI
