#include "kvevict/train/trainer.hpp"
#include "kvevict/cpu/token_network.hpp"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/splitmix64.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/lkv_h.hpp"
#include "kvevict/lkv/lkv_t.hpp"
#include "kvevict/model/evict_prefill.hpp"
#include "kvevict/model/observed_prefill.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/select/selector.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::TaskFile;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;

namespace {

constexpr const char* model_folder = "model";

// A random model and five contexts of 24 tokens, each with a probe that counts as answered.
class Room {
 public:
  explicit Room(TinyModel model = TinyModel().fill()) {
    std::filesystem::create_directories(dir_ / model_folder);
    model.write(dir_ / model_folder);
    const CounterRandom random(9, 0);
    std::uint64_t counter = 0;
    const auto tokens = [&](std::size_t count) {
      std::vector<index_t> out;
      while (out.size() < count) out.push_back(static_cast<index_t>(random.below(counter++, 50)));
      return out;
    };
    TaskFile file;
    for (index_t c = 0; c < 5; ++c) {
      file.context(tokens(24), tokens(6));
      file.probe(c, tokens(3), tokens(2));
    }
    files_.emplace_back(file.write(dir_ / "train.safetensors"));
    teacher_ = std::make_unique<LkvTeacher>(dir_ / model_folder);
  }
  LkvTeacher& teacher() { return *teacher_; }
  std::span<const Tasks> files() const { return files_; }
  std::filesystem::path operator/(std::string_view name) const { return dir_ / name; }
  LkvTrainer trainer(const LkvRecipe& recipe, int threads = 1, const std::filesystem::path& folder = {}) {
    return LkvTrainer({threads, nullptr}, teacher(), files(), recipe, TeacherFolder(folder));
  }

 private:
  TempDir dir_;
  std::vector<Tasks> files_;
  std::unique_ptr<LkvTeacher> teacher_;
};

LkvRecipe small_recipe() {
  LkvRecipe r;
  r.steps = 6;
  r.batch = 3;
  r.group = 2;
  r.lr = 1e-2;
  r.lr_end = 1e-3;
  r.tau_end = 0.1;
  r.retain_end = 0.25;
  r.head_width = 4;
  r.head_hidden = 3;
  r.token_hidden = 5;
  r.continuation = 4;
  r.check_contexts = 1;
  return r;
}

std::vector<float> numbers(LkvTrainer& t) {
  const ExportedLkv e = t.weights();
  std::vector<float> out;
  for (const auto* v :
       {&e.embedding, &e.head_w1, &e.head_b1, &e.head_w2, &e.token_w1, &e.token_b1, &e.token_w2, &e.head_length})
    out.insert(out.end(), v->begin(), v->end());
  return out;
}

std::vector<float> trained(Room& room, const LkvRecipe& recipe, int threads = 1,
                           const std::filesystem::path& folder = {}) {
  auto t = room.trainer(recipe, threads, folder);
  while (!t.finished()) t.step();
  return numbers(t);
}

template <class Error, class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("a run that resumes gives the weights of one that was never broken, on any number of threads") {
  Room room;
  const auto whole = trained(room, small_recipe());
  CHECK(trained(room, small_recipe(), 2) == whole);

  {
    auto first = room.trainer(small_recipe());
    for (int i = 0; i < 3; ++i) first.step();
    first.save(room / "state");
  }
  auto second = room.trainer(small_recipe());
  second.resume(room / "state");
  CHECK(second.steps_done() == 3);
  while (!second.finished()) second.step();
  CHECK(numbers(second) == whole);
}

TEST_CASE("teachers from a folder are those from memory") {
  Room room;
  const auto whole = trained(room, small_recipe());
  CHECK(trained(room, small_recipe(), 1, room / "teachers") == whole);
  CHECK_FALSE(std::filesystem::is_empty(room / "teachers"));
  CHECK(trained(room, small_recipe(), 1, room / "teachers") == whole);  // now read back
}

TEST_CASE("killed at any moment, a run goes on from its last saved state to the same weights") {
  Room room;
  const auto whole = trained(room, small_recipe());
  const auto state = room / "state";
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    auto t = room.trainer(small_recipe());
    for (;;) {  // saves until it is killed
      if (t.steps_done() < 4) t.step();
      t.save(state);
    }
  }
  while (!std::filesystem::exists(state)) ::usleep(1000);
  ::usleep(3000);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  auto t = room.trainer(small_recipe());
  t.resume(state);
  CHECK(t.steps_done() >= 1);
  while (!t.finished()) t.step();
  CHECK(numbers(t) == whole);
}

TEST_CASE("a state of another recipe or of other contexts is refused") {
  Room room;
  auto t = room.trainer(small_recipe());
  t.step();
  t.save(room / "state");
  auto other = small_recipe();
  other.beta = 0.25;
  auto wrong = room.trainer(other);
  CHECK(contains(message_of<format_error>([&] { wrong.resume(room / "state"); }), "beta=0.25"));
  auto fewer = small_recipe();
  fewer.contexts = 2;
  auto less = room.trainer(fewer);
  CHECK(contains(message_of<format_error>([&] { less.resume(room / "state"); }), "recipe"));
  TinyModel model = TinyModel().fill();
  for (float& x : model.tensors["model.norm.weight"].values) x *= 0.5f;
  Room elsewhere(model);
  auto foreign = elsewhere.trainer(small_recipe());
  CHECK(contains(message_of<format_error>([&] { foreign.resume(room / "state"); }), "made with another model"));
}

TEST_CASE("what cannot be meant is refused before anything runs") {
  Room room;
  auto r = small_recipe();
  r.set("budget_length", "true");
  r.set("budgets", "uniform");
  CHECK(contains(message_of<std::invalid_argument>([&] { room.trainer(r); }), "budgets=network or direct is required"));
  r = small_recipe();
  r.token_hidden = 1'000'000'000;
  CHECK(
      contains(message_of<std::invalid_argument>([&] { room.trainer(r); }), "token_hidden is 1000000000; 1 to 16384"));
  r = small_recipe();
  r.check_contexts = 0;
  CHECK(room.trainer(r).contexts_held_out() == 0);
}

TEST_CASE("every switch of the recipe changes what is learned") {
  Room room;
  auto base = small_recipe();
  base.steps = 2;
  const auto plain = trained(room, base);
  for (const auto& change : {std::pair{"noise", "false"},
                             {"threshold", "sigmoid"},
                             {"masked_queries", "dense"},
                             {"budgets", "direct"},
                             {"budget_length", "true"},
                             {"budgets", "uniform"},
                             {"beta", "0"},
                             {"key_frame", "post-rope"},
                             {"features", "none"},
                             {"scale_inputs", "false"},
                             {"seed", "2"},
                             {"retain_spread", "2"},
                             {"tau_end", "0.05"},
                             {"retain_end", "0.5"},
                             {"clip", "0"},
                             {"weight_decay", "0.1"},
                             {"continuation", "3"},
                             {"contexts", "2"},
                             {"warm_up", "1"}}) {
    auto r = base;
    r.set(change.first, change.second);
    CAPTURE(change.first);
    CAPTURE(change.second);
    CHECK(trained(room, r) != plain);
  }
}

TEST_CASE("a recipe reads back from its own text and refuses what it does not know") {
  LkvRecipe r;
  r.set("steps", "77");
  r.set("key_frame", "post-rope");
  CHECK(r.steps == 77);
  CHECK(contains(r.text(), "steps=77,"));
  CHECK(contains(r.text(), "key_frame=post-rope,"));
  CHECK(contains(message_of<std::invalid_argument>([&] { r.set("lern_rate", "1"); }), "'lern_rate' is unknown"));
  CHECK(contains(message_of<std::invalid_argument>([&] { r.set("lr", "fast"); }), "lr=fast is not a number"));
  r.lr_end = 1;
  CHECK(contains(message_of<std::invalid_argument>([&] { r.check(); }), "lr_end <= lr"));
}

TEST_CASE("a number that is not finite stops the training with the step") {
  TinyModel model = TinyModel().fill();
  Room room(model);
  auto good = room.trainer(small_recipe());
  CHECK_NOTHROW(good.step());
  for (float& x : model.tensors["model.norm.weight"].values) x = std::numeric_limits<float>::infinity();
  Room broken(model);
  auto t = broken.trainer(small_recipe());
  CHECK(contains(message_of<std::domain_error>([&] { t.step(); }), "step 0: the loss is not finite"));
  CHECK(t.steps_done() == 0);

  // Keys that overflow half precision.
  TinyModel large = TinyModel().fill();
  for (float& x : large.tensors["model.layers.2.self_attn.k_proj.weight"].values) x *= 1e8f;
  Room overflow(large);
  auto u = overflow.trainer(small_recipe());
  CHECK(contains(message_of<std::domain_error>([&] { u.step(); }), "step 0: scores of lkv_t, layer 2"));
}

TEST_CASE("a damaged state is refused, wherever the bit is, and changes nothing") {
  Room room;
  auto t = room.trainer(small_recipe());
  t.step();
  t.save(room / "state");
  const auto whole = numbers(t);
  const std::string bytes = testing::read_bytes(room / "state");
  std::vector<std::size_t> places{0, 9, 40, bytes.size() - 1, bytes.size() - 4};
  for (std::uint64_t i = 0; i < 40; ++i) places.push_back(detail::splitmix64(i) % bytes.size());
  for (std::size_t at = 0; at < 1000; at += 41) places.push_back(at);  // the header
  int accepted = 0;
  for (const std::size_t at : places) {
    auto damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << at % 8);
    testing::write_bytes(room / "state", damaged);
    try {
      t.resume(room / "state");
      ++accepted;
    } catch (const format_error&) {
    }
  }
  CHECK(accepted == 0);
  CHECK(numbers(t) == whole);
  testing::write_bytes(room / "state", bytes);
  t.resume(room / "state");
  CHECK(numbers(t) == whole);
}

TEST_CASE("unchecked probes stay where the full cache answers them, and go where it does not") {
  Room room;
  // What the model itself says after the question is an answer that it gives.
  const std::vector<index_t> context = {1, 2, 3, 4, 5, 6, 7, 8}, question = {9, 10};
  const Decoder decoder(room / model_folder);
  RaggedCache<float> cache(decoder.cache_shape());
  ForwardState state;
  std::vector<index_t> all = context;
  all.insert(all.end(), question.begin(), question.end());
  decoder.feed({}, all, cache, state);
  std::vector<float> logits(50);
  const index_t last = 9;
  decoder.logits({}, state, std::span(&last, 1), {logits.data(), 1, 50, 50});
  const auto said = static_cast<index_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  TaskFile file;
  file.context(context, {11, 12, 13});
  file.probe(0, question, {said}, -1);
  file.probe(0, question, {(said + 1) % 50}, -1);
  file.probe(0, question, {said}, 0);
  const Tasks tasks(file.write(room / "probes.safetensors"));
  const TeacherContext t = room.teacher().context({}, tasks, 0, 2);
  CHECK(t.probes.size() == 1);
  CHECK(t.probes[0].tokens == question);
  CHECK(t.probes[0].first_scored == 1);
  CHECK(t.continuation.tokens == std::vector<index_t>{11, 12});
  CHECK(t.continuation.scored() == 2);
}

TEST_CASE("training lowers the loss of inference") {
  Room room;
  auto r = small_recipe();
  r.steps = 150;
  r.lr = 3e-2;
  r.lr_end = 3e-3;
  auto t = room.trainer(r);
  const double before = t.hard_loss(0.25).hidden;
  while (!t.finished()) t.step();
  CHECK(t.hard_loss(0.25).hidden < 0.9 * before);
}

TEST_CASE(
    "layer by layer, LKV evicts what it evicts at the end, and holds no more than its budget and one full layer") {
  Room room;
  auto t = room.trainer(small_recipe());
  while (!t.finished()) t.step();
  const ExportedLkv weights = t.weights();
  write_lkv_checkpoint(room / "lkv.safetensors", weights.sizes, weights.tensors(), {{"model", "tiny"}});
  const LkvFile file((room / "lkv.safetensors").string());
  const Policy<allocate::LkvH, score::LkvT, TopK> policy{{file}, {file}, {}};
  const Decoder decoder(room / model_folder);
  const CacheShape shape = decoder.cache_shape();
  const auto tokens = room.files()[0].context(0);
  const Budget budget = Budget::retain(0.3);

  RaggedCache<float> live(shape);
  ForwardState state;
  const EvictedPrefill done = prefill_and_evict({}, decoder, tokens, policy, budget, live, state);
  ForwardState other;
  CaptureOptions capture;
  capture.add(policy.scorer.needs, policy.scorer.window_rows());
  const ObservedPrefill prefill({}, decoder, tokens, capture, other);
  const EvictionPlan plan = policy.plan({}, prefill.cache(), prefill.observations(), budget);
  RaggedCache<float> late(prefill.cache());
  apply(host_exec{}, plan, late);
  std::int64_t kept = 0;
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      REQUIRE(live.tokens(l, h) == late.tokens(l, h));
      kept += live.tokens(l, h);
      for (index_t r = 0; r < live.tokens(l, h); ++r)
        for (index_t c = 0; c < shape.head_dim_k; ++c) {
          CHECK(live.keys(l, h).at(r, c) == late.keys(l, h).at(r, c));
          CHECK(live.values(l, h).at(r, c) == late.values(l, h).at(r, c));
        }
    }
  const auto n = static_cast<std::int64_t>(tokens.size());
  CHECK(kept <= std::int64_t{43});  // floor(0.3 * 6 heads * 24 rows)
  CHECK(kept > 0);
  CHECK(done.rows_peak <= 43 + shape.kv_heads * n);
  CHECK(done.rows_peak < shape.heads_total() * n);
}

TEST_CASE("learned budgets beat uniform ones and come close to the best that dynamic programming finds") {
  // Eight heads of 64 rows whose importance falls as rank^-a; a head that misses a share s of it costs s^2.
  constexpr index_t heads = 8, rows = 64;
  const double retain = 0.15;
  std::vector<std::vector<double>> mass(heads), scores(heads);
  for (index_t h = 0; h < heads; ++h) {
    double sum = 0;
    for (index_t i = 0; i < rows; ++i)
      sum += mass[static_cast<std::size_t>(h)].emplace_back(std::pow(i + 1, -0.2 - 0.3 * h));
    for (double& m : mass[static_cast<std::size_t>(h)])
      scores[static_cast<std::size_t>(h)].push_back(std::log(m /= sum));
  }
  const auto cost = [&](std::size_t h, std::int64_t kept) {
    double missed = 1;
    for (std::int64_t i = 0; i < kept; ++i) missed -= mass[h][static_cast<std::size_t>(i)];
    return missed * missed;
  };
  std::vector<double> logits(heads, 0.0), gradient(heads), ratios(heads), grad_ratios(heads);
  AdamW<double> adam(heads);
  std::vector<double> mask(rows), grad(rows), scratch(soft_topk_scratch(rows));
  constexpr int steps = 300;
  for (int step = 0; step < steps; ++step) {
    const double tau = ExponentialSchedule{1, 0.05}.at(step, steps);
    const double threshold = head_ratios(logits, retain, ratios);
    for (std::size_t h = 0; h < heads; ++h) {
      const double t = soft_topk<double>(scores[h], ratios[h] * rows, tau, mask, scratch);
      double missed = 1;
      for (std::size_t i = 0; i < rows; ++i) missed -= mask[i] * mass[h][i];
      for (std::size_t i = 0; i < rows; ++i) grad[i] = -2 * missed * mass[h][i];
      grad_ratios[h] = rows * soft_topk_backward<double>(scores[h], t, tau, grad, {}).k;
    }
    head_ratios_backward(logits, threshold, grad_ratios, gradient);
    adam.step(logits, gradient, 0.05);
  }
  head_ratios(logits, retain, ratios);

  const auto total = static_cast<std::int64_t>(retain * heads * rows);  // 76
  GrantedBudget budget;
  budget.full = heads * rows;
  budget.total = total;
  Audit audit;
  const std::vector<index_t> tokens(heads, rows);
  const auto kept = allocate::LkvH::lkv_rows(ratios, tokens, budget, true, audit);
  double learned = 0, uniform = 0;
  for (std::size_t h = 0; h < heads; ++h) {
    learned += cost(h, kept[h]);
    uniform += cost(h, h < 4 ? 10 : 9);  // 76 rows
  }
  std::vector<double> best(static_cast<std::size_t>(total) + 1, 0.0);
  for (std::size_t h = 0; h < heads; ++h)
    for (std::int64_t b = total; b >= 0; --b) {
      double least = 1e9;
      for (std::int64_t k = 0; k <= std::min<std::int64_t>(b, rows); ++k)
        least = std::min(least, (h == 0 ? 0.0 : best[static_cast<std::size_t>(b - k)]) + cost(h, k));
      best[static_cast<std::size_t>(b)] = least;
    }
  CAPTURE(uniform);
  CAPTURE(learned);
  CAPTURE(best.back());
  CHECK(learned < 0.95 * uniform);
  CHECK(learned < best.back() + 0.15 * (uniform - best.back()));
}
