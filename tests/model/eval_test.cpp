// Evaluation against reference results of SmolLM2-135M-Instruct on the development tasks: kept sets of two contexts
// (tests/golden/lkv/dev_masks.safetensors) and divergences, likelihoods and answers of 24.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/expected_attention.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/evaluate.hpp"
#include "kvevict/model/observed_prefill.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/expected.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/snapkv.hpp"

using namespace kvevict;

namespace {

const char* const tasks_file = KVEVICT_SOURCE_DIR "/examples/data/dev.safetensors";
const host_exec exec{2};

const Decoder& smollm2() {
  static const Decoder d(KVEVICT_MODEL_DIR);
  return d;
}

score::SnapKV snapkv_inside_the_budget() {
  score::SnapKV s;
  s.pool = Pooling::avg(5);
  s.order = PoolOrder::pool_then_group;
  s.protect = ProtectShare::score;
  return s;
}
score::Expected expected_behind_sinks() {
  score::Expected s;
  s.sinks = 4;
  return s;
}
template <class S>
auto ada_kvpress(S scorer) {
  allocate::Ada<> a;
  a.variant = AdaVariant::kvpress;
  return Policy{a, scorer};
}

// visit(name in the reference, policy)
template <class Visit>
void each_policy(Visit&& visit) {
  visit("streaming", Policy{allocate::Uniform{}, score::Position{}});
  visit("snapkv", Policy{allocate::Uniform{}, snapkv_inside_the_budget()});
  visit("ada_snapkv", ada_kvpress(snapkv_inside_the_budget()));
  visit("expattn", Policy{allocate::Uniform{}, expected_behind_sinks()});
  visit("keydiff", Policy{allocate::Uniform{}, score::KeyDiff{}});
  visit("ada+keydiff", ada_kvpress(score::KeyDiff{}));
  visit("knorm", Policy{allocate::Uniform{}, score::KNorm{}});
}

CaptureOptions everything() {
  CaptureOptions out;
  each_policy([&](const std::string&, const auto& p) { out.add(p.scorer.needs, p.scorer.window_rows()); });
  return out;
}

}  // namespace

TEST_CASE("kept sets agree with the reference up to scores within 1e-4 of the cut") {
  const Tasks tasks(tasks_file);
  const Safetensors masks(KVEVICT_TEST_DATA "/lkv/dev_masks.safetensors");
  for (const index_t c : {0, 1}) {
    ForwardState state;
    const ObservedPrefill prefill(exec, smollm2(), tasks.context(c), everything(), state);
    each_policy([&](const std::string& name, const auto& policy) {
      const auto keep = masks.at("ctx" + std::to_string(c) + ".keep_r015." + name).template as<std::uint8_t>();
      const auto plan = policy.plan(exec, prefill.cache(), prefill.observations(), Budget::retain(0.15));
      std::vector<float> scores(3 * 512);
      int swapped = 0, wrong = 0;
      for (index_t l = 0; l < 30; ++l) {
        score_on(exec, policy.scorer, prefill.observations()[static_cast<std::size_t>(l)],
                 Matrix<float>{scores.data(), 3, 512, 512});
        for (index_t h = 0; h < 3; ++h) {
          const auto ours = plan.head(l, h);
          const float* s = scores.data() + std::int64_t{h} * 512;
          float cut = s[ours.front()];
          for (const index_t t : ours) cut = std::min(cut, s[t]);
          for (index_t t = 0; t < 512; ++t) {
            const bool kept = std::binary_search(ours.begin(), ours.end(), t);
            if (kept == (keep[(static_cast<std::size_t>(l) * 3 + static_cast<std::size_t>(h)) * 512 +
                              static_cast<std::size_t>(t)] != 0))
              continue;
            ++swapped;
            wrong += std::abs(s[t] - cut) > 1e-4f * std::max(std::abs(cut), name.ends_with("keydiff") ? 1.f : 0.f);
          }
        }
      }
      INFO(name, ", context ", c, ": ", swapped, " rows differ, ", wrong, " of them not by rounding");
      CHECK(wrong == 0);
      CHECK(swapped <= 20);
    });
  }
}

TEST_CASE("divergences and answers agree with the reference on 24 contexts at retain 0.15") {
  struct Row {
    std::string name;
    double kl_answer, kl_continuation;
    int right;
  };
  // In the order of each_policy().
  const std::vector<Row> reference{{"streaming", 3.109, 0.195, 1},  {"snapkv", 3.030, 0.145, 1},
                                   {"ada_snapkv", 3.033, 0.138, 1}, {"expattn", 2.327, 0.177, 4},
                                   {"keydiff", 1.167, 0.474, 12},   {"ada+keydiff", 0.788, 0.651, 20},
                                   {"knorm", 2.515, 0.549, 1}};
  const Tasks tasks(tasks_file);
  std::vector<std::vector<ContextResult>> results(reference.size());
  for (index_t c = 0; c < 24; ++c) {
    ContextEvaluation evaluation(exec, smollm2(), tasks, c, everything(), {2, 33});
    if (c == 0)
      each_policy([&](const std::string& name, const auto& policy) {
        CAPTURE(name);
        const ContextResult all = evaluation(policy, Budget::retain(1));
        CHECK(all.kl_answers < 1e-6);
        CHECK(all.kl_continuation < 1e-6);
        CHECK(all.probes_right == all.probes);
      });
    std::size_t i = 0;
    each_policy([&](const std::string&, const auto& policy) {
      results[i++].push_back(evaluation(policy, Budget::retain(0.15)));
    });
  }
  const auto close = [](double a, double b) { return std::abs(a - b) <= std::max(0.02, 0.05 * b); };
  for (std::size_t i = 0; i < reference.size(); ++i) {
    CAPTURE(reference[i].name);
    const EvaluationResult r = summarise(results[i]);
    CHECK(r.probes == 44);
    CHECK(r.nll_continuation_full == doctest::Approx(2.751).epsilon(0.002));
    CHECK_MESSAGE(close(r.kl_answer, reference[i].kl_answer), r.kl_answer);
    CHECK_MESSAGE(close(r.kl_continuation, reference[i].kl_continuation), r.kl_continuation);
    CHECK(std::abs(r.accuracy * 44 - reference[i].right) <= 2.01);
  }
}
