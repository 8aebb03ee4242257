// LKV on SmolLM2-135M-Instruct: stored weights of an independent implementation against its scores, kept rows and
// results, and what the shipped checkpoints promise.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cpu/token_network.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/lkv/lkv_h.hpp"
#include "kvevict/lkv/lkv_t.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/evaluate.hpp"
#include "kvevict/model/evict_prefill.hpp"
#include "kvevict/model/observed_prefill.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/select/selector.hpp"
#include "kvevict/train/trainer.hpp"

using namespace kvevict;

namespace {

const std::string golden = std::string(KVEVICT_TEST_DATA) + "/lkv/";
const std::string data = std::string(KVEVICT_SOURCE_DIR) + "/examples/data/";
const host_exec exec{2};

const Decoder& smollm2() {
  static const Decoder d(KVEVICT_MODEL_DIR);
  return d;
}
const Tasks& dev() {
  static const Tasks t(data + "dev.safetensors");
  return t;
}

Policy<allocate::LkvH, score::LkvT, TopK> lkv(const std::string& path) {
  const LkvFile file(path);
  return {{file}, {file}, {}};
}

CaptureOptions capture() {
  CaptureOptions out;
  out.add(score::LkvT::needs, 0);
  return out;
}

// The first `contexts` development contexts of 512 tokens, two probes each.
EvaluationResult judge(const std::string& path, double retain, int contexts) {
  const auto policy = lkv(path);
  std::vector<ContextResult> results;
  for (index_t c = 0; c < contexts; ++c) {
    ContextEvaluation e(exec, smollm2(), dev(), c, capture(), {2, 33});
    results.push_back(e(policy, Budget::retain(retain)));
  }
  return summarise(results);
}

}  // namespace

TEST_CASE("token scores of the stored weights agree to 1e-3 of the largest") {
  const score::LkvT scorer{LkvFile(golden + "weights.safetensors")};
  const Safetensors expected(golden + "expected.safetensors");
  const auto wanted = expected.at("u.dev0").as<float>();
  ForwardState state;
  const ObservedPrefill prefill(exec, smollm2(), dev().context(0), capture(), state);
  const double largest = std::abs(static_cast<double>(
      *std::max_element(wanted.begin(), wanted.end(), [](float a, float b) { return std::abs(a) < std::abs(b); })));
  std::vector<float> scores(3 * 512);
  double worst = 0;
  for (const auto& o : prefill.observations()) {
    score_on(exec, scorer, o, {scores.data(), 3, 512, 512});
    for (std::size_t i = 0; i < scores.size(); ++i)
      worst = std::max(
          worst,
          std::abs(static_cast<double>(scores[i] - wanted[static_cast<std::size_t>(o.layer) * scores.size() + i])));
  }
  CHECK(worst < 1e-3 * largest);
}

TEST_CASE("the stored weights give their recorded results on the first contexts, and keep the recorded rows") {
  const auto policy = lkv(golden + "weights.safetensors");
  const Safetensors masks(golden + "dev_masks.safetensors");
  const auto keep = masks.at("ctx0.keep_r015.lkv").as<std::uint8_t>();
  ForwardState state;
  const ObservedPrefill prefill(exec, smollm2(), dev().context(0), capture(), state);
  const EvictionPlan plan = policy.plan(exec, prefill.cache(), prefill.observations(), Budget::retain(0.15));
  std::int64_t other = 0;
  for (std::size_t head = 0; head < 90; ++head)
    for (std::int64_t i = plan.offsets[head]; i < plan.offsets[head + 1]; ++i)
      other += keep[head * 512 + static_cast<std::size_t>(plan.indices[static_cast<std::size_t>(i)])] == 0;
  CHECK(plan.rows_kept() == std::count(keep.begin(), keep.end(), std::uint8_t{1}));
  CHECK(other <= 20);  // scores within rounding of the cut
}

TEST_CASE("the shipped checkpoint keeps what the model says at 0.15, and most of it at 0.05") {
  const auto at15 = judge(data + "lkv-smollm2.safetensors", 0.15, 6);
  CHECK(at15.kl_answer < 0.15);
  CHECK(at15.kl_continuation < 0.15);
  CHECK(at15.accuracy >= 0.8);
  CHECK(at15.rows_kept_fraction <= 0.15);
  const auto at5 = judge(data + "lkv-smollm2.safetensors", 0.05, 6);
  CHECK(at5.kl_answer < 0.8);
  CHECK(at5.accuracy >= 0.5);
}

TEST_CASE("layer by layer on the real model: the same rows as at the end, no more than the budget and one full layer") {
  const auto policy = lkv(data + "lkv-smollm2.safetensors");
  const auto tokens = dev().context(1);
  const Budget budget = Budget::retain(0.15);
  RaggedCache<float> live(smollm2().cache_shape());
  ForwardState state;
  const EvictedPrefill done = prefill_and_evict(exec, smollm2(), tokens, policy, budget, live, state);
  const ObservedPrefill prefill(exec, smollm2(), tokens, capture(), state);
  const EvictionPlan plan = policy.plan(exec, prefill.cache(), prefill.observations(), budget);
  CHECK(same_rows(done.plan, plan));
  CHECK(done.rows_peak <= 6912 + 3 * 512);  // floor(0.15 * 90 * 512) and one layer
  CHECK(done.rows_full == 90 * 512);
}

TEST_CASE("a mask of ones has no loss against the teacher, nor a step's worth of gradient") {
  LkvTeacher teacher(KVEVICT_MODEL_DIR);
  const TeacherContext t = teacher.context(exec, dev(), 0, 8);
  const std::size_t heads = 90 * 512;
  std::vector<float> mask(heads, 1.f), grad(heads, 0.f);
  MaskedContext<float, fp16_t> c;
  c.tokens = t.tokens;
  c.keys = t.keys.data();
  c.values = t.values.data();
  const std::vector<index_t> offsets{0, static_cast<index_t>(t.continuation.tokens.size())};
  c.branches = {t.continuation.tokens, offsets};
  c.mask = mask.data();
  c.grad_mask = grad.data();
  for (index_t r = 0; r < t.continuation.scored(); ++r)
    c.scored.push_back({r, 1.0 / 8, t.continuation.hidden.data() + static_cast<std::size_t>(r) * 30 * 576});
  MaskedDecoder<float, fp16_t> student(teacher.config(), teacher.weights());
  std::vector<DistillationLoss> losses(1);
  student.forward(std::span(&c, 1));
  student.backward(0.5, losses);
  CHECK(std::abs(losses[0].kl) < 1e-6);
  CHECK(losses[0].hidden < 1e-6);
  const auto [least, most] = std::minmax_element(grad.begin(), grad.end());
  CHECK(*least > -1e-4f);
  CHECK(*most < 1e-4f);
}
