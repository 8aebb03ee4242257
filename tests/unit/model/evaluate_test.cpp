#include "kvevict/model/evaluate.hpp"
#include "kvevict/cpu/expected_attention.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/window_attention.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/global.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/model/evict_prefill.hpp"
#include "kvevict/score/expected.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/snapkv.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::TaskFile;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;

namespace {

std::vector<index_t> some_tokens(index_t count, index_t seed = 0) {
  std::vector<index_t> out;
  for (index_t i = seed; i < seed + count; ++i) out.push_back((i * i * 7 + i * 3) % 50);
  return out;
}

const TinyModel& tiny_model() {
  static const TinyModel model = TinyModel{}.fill();
  return model;
}
const Decoder& tiny() {
  static const Decoder d = [] {
    const TempDir dir;
    tiny_model().write(dir.path());
    return Decoder(dir.path());
  }();
  return d;
}

// What the model says greedily after `tokens`, by the textbook formulas.
std::vector<index_t> greedy(std::vector<index_t> tokens, index_t count) {
  std::vector<index_t> out;
  for (index_t i = 0; i < count; ++i) {
    const auto last = tiny_model().reference(tokens).back();
    out.push_back(static_cast<index_t>(std::max_element(last.begin(), last.end()) - last.begin()));
    tokens.push_back(out.back());
  }
  return out;
}

std::vector<index_t> joined(std::vector<index_t> a, const std::vector<index_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::vector<index_t> context = some_tokens(60), continuation = some_tokens(9, 100), question{3, 14, 15},
                           other_question{9, 26};

TaskFile one_context() {
  TaskFile f;
  f.context(context, continuation);
  f.probe(0, question, greedy(joined(context, question), 3));
  return f;
}

template <class P>
ContextResult evaluate(const TaskFile& file, const P& policy, double retain, const EvaluationLimits& limits = {},
                       const host_exec& exec = {}) {
  const TempDir dir;
  const Tasks tasks(file.write(dir / "tasks.safetensors"));
  CaptureOptions capture;
  capture.add(policy.scorer.needs, policy.scorer.window_rows());
  ContextEvaluation evaluation(exec, tiny(), tasks, 0, capture, limits);
  ContextResult r = evaluation(policy, Budget::retain(retain));
  r.seconds = 0;
  return r;
}

std::vector<double> log_softmax(std::span<const float> logits) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  std::vector<double> out;
  for (const float x : logits) out.push_back(static_cast<double>(x) - std::log(sum));
  return out;
}

// Log probabilities at every token of `fed`, decoded after `cache` one by one.
std::vector<std::vector<double>> decode(RaggedCache<float> cache, const std::vector<index_t>& fed) {
  std::vector<std::vector<double>> out;
  ForwardState state;
  std::vector<float> logits(50);
  const index_t row = 0;
  for (const index_t token : fed) {
    tiny().feed({}, {&token, 1}, cache, state);
    tiny().logits({}, state, {&row, 1}, {logits.data(), 1, 50, 50});
    out.push_back(log_softmax(logits));
  }
  return out;
}

double kl(const std::vector<double>& p, const std::vector<double>& q) {
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(p[i]) * (p[i] - q[i]);
  return sum;
}

}  // namespace

TEST_CASE("divergence and log-sum-exp by hand") {
  const std::vector<float> p{0.f, 0.f}, q{0.f, std::log(3.f)};  // 1/2, 1/2 against 1/4, 3/4
  const double p_sum = detail::log_sum_exp(p), q_sum = detail::log_sum_exp(q);
  CHECK(p_sum == doctest::Approx(std::log(2.)));
  CHECK(q_sum == doctest::Approx(std::log(4.)).epsilon(1e-6));
  CHECK(detail::divergence(p, p_sum, q, q_sum) == doctest::Approx(0.5 * std::log(2.) + 0.5 * std::log(2. / 3)));
  CHECK(detail::divergence(q, q_sum, p, p_sum) == doctest::Approx(0.25 * std::log(0.5) + 0.75 * std::log(1.5)));
  const std::vector<float> large{1000.f, 1000.f};
  CHECK(detail::log_sum_exp(large) == doctest::Approx(1000 + std::log(2.)));
}

TEST_CASE("means over probes and contexts, shares of rows; nothing gives NaN") {
  const std::vector<ContextResult> results{{2, 1, 3., 0.5, 2., 1., 100, 10, 40, 1.},
                                           {1, 1, 3., 1.5, 4., 3., 300, 70, 60, 2.}};
  const EvaluationResult r = summarise(results);
  CHECK(r.contexts == 2);
  CHECK(r.probes == 3);
  CHECK(r.kl_answer == 2);  // (3 + 3) / 3 probes
  CHECK(r.kl_continuation == 1);
  CHECK(r.nll_continuation == 3);
  CHECK(r.nll_continuation_full == 2);
  CHECK(r.accuracy == doctest::Approx(2. / 3));
  CHECK(r.rows_kept_fraction == doctest::Approx(0.2));
  CHECK(r.peak_rows_fraction == doctest::Approx(0.25));
  CHECK(r.seconds == 3);
  const EvaluationResult none = summarise(std::vector<ContextResult>{{0, 0, 0., 0.5, 2., 1., 100, 10, 40, 1.}});
  CHECK(std::isnan(none.kl_answer));
  CHECK(std::isnan(none.accuracy));
  CHECK(none.kl_continuation == 0.5);
}

TEST_CASE("retain 1 changes nothing: no divergence, every answer, and the textbook's likelihood") {
  const auto check = [](const auto& policy) {
    const ContextResult r = evaluate(one_context(), policy, 1);
    CHECK(r.kl_answers == 0);
    CHECK(r.kl_continuation == 0);
    CHECK(r.probes_right == 1);
    CHECK(r.rows_kept == 360);
    CHECK(r.rows_peak == 360);
    CHECK(r.nll_continuation == r.nll_continuation_full);
    const auto logits = tiny_model().reference(joined(context, continuation));
    double nll = 0;
    for (std::size_t i = 1; i < continuation.size(); ++i) {
      const auto& row = logits[context.size() + i - 1];
      double sum = 0;
      for (const double x : row) sum += std::exp(x);
      nll += std::log(sum) - row[static_cast<std::size_t>(continuation[i])];
    }
    CHECK(r.nll_continuation_full == doctest::Approx(nll / 8).epsilon(1e-4));
  };
  check(Policy{allocate::Uniform{}, score::Position{}});
  check(Policy{allocate::Uniform{}, score::SnapKV{}});
  check(Policy{allocate::Ada<>{}, score::KNorm{}});
  check(Policy{allocate::Global{}, score::KNorm{}});
  check(Policy{allocate::Uniform{}, score::Expected{}});
}

TEST_CASE("the result is what decoding each branch alone over the evicted cache gives") {
  const auto check = [](const auto& policy) {
    const auto answer = greedy(joined(context, question), 3);
    const ContextResult r = evaluate(one_context(), policy, 0.2);
    RaggedCache<float> full(tiny().cache_shape()), evicted(tiny().cache_shape());
    ForwardState state;
    tiny().feed({}, context, full, state);
    const auto done = prefill_and_evict({}, tiny(), context, policy, Budget::retain(0.2), evicted, state);
    CHECK(r.rows_kept == done.plan.rows_kept());
    CHECK(r.rows_peak == done.rows_peak);

    const auto probe = joined(question, {answer[0], answer[1]});
    const auto p = decode(full, probe), q = decode(evicted, probe);
    double answers = 0;
    bool right = true;
    for (std::size_t i = 0; i < 3; ++i) {
      answers += kl(p[i + 2], q[i + 2]) / 3;
      right = right && std::max_element(q[i + 2].begin(), q[i + 2].end()) - q[i + 2].begin() == answer[i];
    }
    CHECK(r.probes == 1);
    CHECK(r.kl_answers == doctest::Approx(answers).epsilon(1e-4));
    CHECK(r.probes_right == right);

    const std::vector<index_t> text(continuation.begin(), continuation.end() - 1);
    const auto a = decode(full, text), b = decode(evicted, text);
    double divergence = 0, nll = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      divergence += kl(a[i], b[i]) / 8;
      nll -= b[i][static_cast<std::size_t>(continuation[i + 1])] / 8;
    }
    CHECK(divergence > 0.01);
    CHECK(r.kl_continuation == doctest::Approx(divergence).epsilon(1e-4));
    CHECK(r.nll_continuation == doctest::Approx(nll).epsilon(1e-5));
  };
  SUBCASE("position") { check(Policy{allocate::Uniform{}, score::Position{}}); }
  SUBCASE("window, ragged heads") { check(Policy{allocate::Ada<>{}, score::SnapKV{}}); }
  SUBCASE("a global allocator holds every row at its peak") { check(Policy{allocate::Global{}, score::KNorm{}}); }
  SUBCASE("query statistics") { check(Policy{allocate::Uniform{}, score::Expected{}}); }
}

TEST_CASE("only probes that the full cache answers count; unchecked ones are asked") {
  const auto good = greedy(joined(context, question), 2), other = greedy(joined(context, other_question), 2);
  const std::vector<index_t> wrong{(other[0] + 1) % 50, other[1]};
  const Policy policy{allocate::Uniform{}, score::Position{}};
  TaskFile f;
  f.context(context, continuation);
  f.probe(0, other_question, wrong, 0);   // known to fail: left out
  f.probe(0, other_question, wrong, -1);  // found to fail
  f.probe(0, question, good, -1);         // found to be answered
  f.probe(0, other_question, other, 1);
  const ContextResult all = evaluate(f, policy, 1);
  CHECK(all.probes == 2);
  CHECK(all.probes_right == 2);

  // The first answered probe alone gives what that probe alone gives.
  TaskFile alone;
  alone.context(context, continuation).probe(0, question, good);
  const ContextResult first = evaluate(f, policy, 0.3, {1, 0}), expected = evaluate(alone, policy, 0.3);
  CHECK(first.probes == 1);
  CHECK(first.probes_right == expected.probes_right);
  CHECK(first.kl_answers == doctest::Approx(expected.kl_answers).epsilon(1e-4));
  CHECK(first.kl_continuation == doctest::Approx(expected.kl_continuation).epsilon(1e-4));
  CHECK(evaluate(f, policy, 0.3).kl_answers > expected.kl_answers * 1.01);
}

TEST_CASE("U42: the context is compressed before any question is known; other questions change nothing else") {
  const Policy policy{allocate::Ada<>{}, score::SnapKV{}};
  TaskFile none, other;
  none.context(context, continuation);
  other.context(context, continuation).probe(0, other_question, {1, 2});
  const ContextResult a = evaluate(none, policy, 0.2), b = evaluate(other, policy, 0.2),
                      c = evaluate(one_context(), policy, 0.2);
  CHECK(a.probes == 0);
  for (const ContextResult& r : {b, c}) {
    CHECK(r.probes == 1);
    CHECK(r.rows_kept == a.rows_kept);
    CHECK(r.kl_continuation == doctest::Approx(a.kl_continuation).epsilon(1e-4));
    CHECK(r.nll_continuation == doctest::Approx(a.nll_continuation).epsilon(1e-5));
  }
}

TEST_CASE("a limit on the continuation scores that many tokens less one") {
  const Policy policy{allocate::Uniform{}, score::Position{}};
  TaskFile shorter;
  shorter.context(context, {continuation.begin(), continuation.begin() + 4});
  shorter.probe(0, question, greedy(joined(context, question), 3));
  CHECK(evaluate(one_context(), policy, 0.3, {0, 4}) == evaluate(shorter, policy, 0.3));
  CHECK(evaluate(one_context(), policy, 0.3, {0, 4}).kl_continuation !=
        evaluate(one_context(), policy, 0.3).kl_continuation);
  CHECK(evaluate(one_context(), policy, 0.3, {0, 1000}) == evaluate(one_context(), policy, 0.3));
  CHECK_THROWS_AS(evaluate(one_context(), policy, 0.3, {0, 1}), std::invalid_argument);
  CHECK_THROWS_AS(evaluate(one_context(), policy, 0.3, {-1, 0}), std::invalid_argument);
}

TEST_CASE("threads change no bit, and one context serves many policies") {
  const Policy window{allocate::Uniform{}, score::SnapKV{}};
  const Policy norm{allocate::Uniform{}, score::KNorm{}};
  CHECK(evaluate(one_context(), window, 0.3, {}, {3}) == evaluate(one_context(), window, 0.3));
  const TempDir dir;
  const Tasks tasks(one_context().write(dir / "tasks.safetensors"));
  CaptureOptions capture;
  capture.add(window.scorer.needs, window.scorer.window_rows());
  ContextEvaluation evaluation({}, tiny(), tasks, 0, capture, {});
  const auto again = [&](const auto& policy, double retain) {
    ContextResult r = evaluation(policy, Budget::retain(retain));
    r.seconds = 0;
    return r;
  };
  CHECK(again(norm, 0.1) == evaluate(one_context(), norm, 0.1));
  CHECK(again(window, 0.3) == evaluate(one_context(), window, 0.3));
  CHECK(again(norm, 0.1) == evaluate(one_context(), norm, 0.1));
}

TEST_CASE("contexts beyond the model's positions are refused by name, counting what follows them") {
  // 400 positions: 392 tokens and the first 8 of 9 just fit.
  const Policy policy{allocate::Uniform{}, score::Position{}};
  TaskFile fits, longer;
  fits.context(some_tokens(392), continuation);
  longer.context(some_tokens(393), continuation);
  CHECK_NOTHROW(evaluate(fits, policy, 0.1));
  CHECK_THROWS_WITH_AS(evaluate(longer, policy, 0.1),
                       doctest::Contains("context 0 has 393 tokens and takes 401 positions"), format_error);
  fits.probe(0, some_tokens(7), {1, 2, 3});
  CHECK_THROWS_WITH_AS(evaluate(fits, policy, 0.1), doctest::Contains("takes 401 positions"), format_error);
}
