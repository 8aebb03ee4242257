// Training of LKV through a frozen model (arXiv 2605.06676): a teacher with the full cache, a student whose context
// rows carry soft masks, AdamW on the weights of LKV-H and LKV-T. Temperature and retention shrink exponentially, the
// rate falls linearly after a warm-up, every score gets Gumbel noise. Context rows are computed with full attention, as
// inference evicts behind the prefill; only what follows the context sees the masks, unless the recipe says "dense".
//
// A step draws contexts of one length from the task files, in each a probe that the teacher answers, and the text that
// follows. Everything random is counted, not streamed: a run that resumes from a saved state gives the same weights as
// one that was never broken, and the number of threads changes nothing.
#pragma once
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/digest.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/lkv/head_net.hpp"
#include "kvevict/train/adamw.hpp"
#include "kvevict/train/lkv_parameters.hpp"
#include "kvevict/train/noise.hpp"
#include "kvevict/train/recipe.hpp"
#include "kvevict/train/schedule.hpp"
#include "kvevict/train/student.hpp"
#include "kvevict/train/teacher.hpp"
#include "kvevict/train/teacher_file.hpp"
#include "kvevict/train/training_set.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What a step did.
struct TrainingStep {
  std::int64_t step = 0;  // from 0
  double temperature = 0, retain = 0, rate = 0;
  double kl = 0, hidden = 0;            // soft loss, before the step
  double gradient_norm = 0;             // before clipping
  double score_deviation = 0;           // of raw scores; noise has 1.28
  double min_ratio = 0, max_ratio = 0;  // retention of a head
  index_t empty_heads = 0;              // in the context that has the most of them
  index_t context_tokens = 0;
};

namespace detail {
// Of the numbers in a state: a file that was damaged after it was written is told by it.
inline std::string state_digest(std::int64_t steps, std::initializer_list<std::span<const float>> tensors) {
  Xxh64 hash;
  hash.update(std::as_bytes(std::span(&steps, 1)));
  for (const auto t : tensors) hash.update(std::as_bytes(t));
  return std::to_string(hash.value());
}
}  // namespace detail

class LkvTrainer {
 public:
  // Throws std::invalid_argument for an impossible recipe or files without contexts.
  LkvTrainer(const host_exec& exec, LkvTeacher& teacher, std::span<const Tasks> files, const LkvRecipe& recipe,
             TeacherFolder folder = TeacherFolder())
      : exec_(exec),
        teacher_(&teacher),
        recipe_(checked(recipe)),
        set_(teacher, files, recipe, std::move(folder)),
        layout_(recipe.sizes(teacher.config().cache_shape())),
        gradients_(layout_.size()),
        adam_(layout_.size(), {0.9, 0.999, 1e-8, recipe.weight_decay, recipe.clip}),
        scale_(InputScale::identity(layout_.sizes())),
        rope_(teacher.config().rope()),
        inverse_rotation_(rope_, set_.longest()) {
    const auto first = initial_parameters<float>(layout_, recipe.seed);
    parameters_.assign(first.begin(), first.end());
  }
  LkvTrainer(const LkvTrainer&) = delete;
  LkvTrainer& operator=(const LkvTrainer&) = delete;

  const LkvRecipe& recipe() const noexcept { return recipe_; }
  std::int64_t steps_done() const noexcept { return adam_.steps; }
  bool finished() const noexcept { return steps_done() >= recipe_.steps; }

  // One step. Throws std::domain_error naming step and tensor where a number is not finite; the weights are then as
  // before the step.
  TrainingStep step();
  // Contexts that are held out to measure on.
  std::size_t contexts_held_out() { return set_.held_out().size(); }
  // Losses of inference at a retention, without noise, on the held-out contexts: KL and hidden states; NaN where there
  // are none.
  DistillationLoss hard_loss(double retain);

  // Weights for inference, as they stand now.
  ExportedLkv weights() { return export_tensors<float>(layout_, parameters_, prepared_scale()); }

  // The state after the last step, whole or not at all.
  void save(const std::filesystem::path& path);
  // Goes on from a saved state. Throws format_error where it is damaged or belongs to another recipe, model or training
  // set; nothing has changed then.
  void resume(const std::filesystem::path& path);

 private:
  static const LkvRecipe& checked(const LkvRecipe& r) {
    r.check();
    return r;
  }
  const InputScale& prepared_scale();
  std::vector<StudentTask> draw(std::int64_t step, double retain);
  void run(std::span<StudentTask> tasks, const StudentMasks* how);
  void head_gradients(std::span<const StudentTask> tasks, std::span<const double> retains);
  std::vector<double> budget_scores(index_t tokens) const;
  std::vector<double> ratios(double retain, index_t tokens) const;
  std::string tensor_name(std::size_t parameter) const;
  LkvStudent& student(std::size_t i) {
    while (students_.size() <= i)
      students_.push_back(std::make_unique<LkvStudent>(*teacher_, layout_, prepared_scale(), inverse_rotation_));
    return *students_[i];
  }

  host_exec exec_;
  LkvTeacher* teacher_;
  LkvRecipe recipe_;
  TrainingSet set_;
  LkvLayout layout_;
  // Aligned, so that no bit depends on where an allocator put them.
  using Aligned = std::vector<float, Eigen::aligned_allocator<float>>;
  Aligned parameters_, gradients_;
  AdamW<float> adam_;
  InputScale scale_;
  bool scaled_ = false;
  Rope rope_;
  InverseRotation inverse_rotation_;
  std::vector<std::unique_ptr<LkvStudent>> students_;  // one per group of a step
  std::vector<Aligned> group_gradients_;               // likewise
  std::vector<double> retains_;                        // of the tasks that were drawn last
};

// Scores of all heads for contexts of this length, before Soft-TopK makes ratios of them.
inline std::vector<double> LkvTrainer::budget_scores(index_t tokens) const {
  std::vector<double> scores(static_cast<std::size_t>(layout_.sizes().heads()));
  head_scores(layout_.head_net(parameters_.data()), scores);
  add_length_scores(layout_.length_slopes(parameters_.data()), std::vector<index_t>(scores.size(), tokens), scores);
  return scores;
}

inline std::vector<double> LkvTrainer::ratios(double retain, index_t tokens) const {
  std::vector<double> out(static_cast<std::size_t>(layout_.sizes().heads()), retain);
  if (recipe_.budgets != BudgetForm::uniform) head_ratios(budget_scores(tokens), retain, out);
  return out;
}

// Mean and deviation of the inputs over the first contexts of each length.
inline const InputScale& LkvTrainer::prepared_scale() {
  constexpr std::size_t contexts = 16;
  if (scaled_ || !recipe_.scale_inputs) return scale_;
  InputScaleEstimate estimate(layout_.sizes());
  std::vector<index_t> positions;
  std::vector<float> x;
  const index_t width = layout_.sizes().token_inputs();
  for (auto& [length, list] : set_.lengths())
    for (std::size_t i = 0; i < std::min(contexts, list.size()); ++i) {
      const TeacherContext& c = set_.teacher(exec_, list[i]);
      x.resize(static_cast<std::size_t>(c.tokens) * static_cast<std::size_t>(width));
      for (std::int64_t h = 0; h < layout_.sizes().heads(); ++h) {
        LkvStudent::inputs(layout_.sizes(), c, h, inverse_rotation_, positions, x.data());
        estimate.add(h, {x.data(), c.tokens, width, width});
      }
    }
  scale_ = estimate.result();
  scaled_ = true;
  return scale_;
}

inline std::vector<StudentTask> LkvTrainer::draw(std::int64_t step, double retain) {
  // `batch` counts contexts of this length; of longer ones a step takes as many as are as much work.
  constexpr std::int64_t batch_tokens = 512;
  // Numbers that a step may draw, and noise that a context and a step of 256 contexts may take.
  constexpr int draw_bits = 16, context_noise_bits = 28, step_noise_bits = context_noise_bits + 8;
  const CounterRandom random(recipe_.seed, draw_stream);
  std::uint64_t counter = static_cast<std::uint64_t>(step) << draw_bits;
  auto& list = set_.list_of(static_cast<std::size_t>(random.below(counter++, set_.contexts())));
  const auto length = static_cast<std::int64_t>(list.front().file->context(list.front().context).size());
  const auto count = static_cast<std::size_t>(std::clamp<std::int64_t>(
      std::int64_t{recipe_.batch} * batch_tokens / length, 1, std::min<std::int64_t>(recipe_.batch, std::ssize(list))));
  std::vector<StudentTask> tasks;
  std::vector<std::size_t> drawn;
  retains_.clear();
  while (tasks.size() < count) {
    auto at = static_cast<std::size_t>(random.below(counter++, list.size()));
    while (std::find(drawn.begin(), drawn.end(), at) != drawn.end()) at = (at + 1) % list.size();
    drawn.push_back(at);
    StudentTask& t = tasks.emplace_back();
    t.teacher = &set_.teacher(exec_, list[at]);
    if (recipe_.masked_queries == MaskedQueries::dense) t.dense = list[at].file->context(list[at].context);
    const auto probe = random.bits(counter++);
    if (!t.teacher->probes.empty()) t.probe = static_cast<index_t>(probe % t.teacher->probes.size());
    const double share = random.uniform(counter++);
    retains_.push_back(retain * std::pow(recipe_.retain_spread, -share));
    t.ratios = ratios(retains_.back(), t.teacher->tokens);
    t.weight = 1 / static_cast<double>(count);
    t.noise_counter = (static_cast<std::uint64_t>(step) << step_noise_bits) +
                      (static_cast<std::uint64_t>(tasks.size()) << context_noise_bits);
  }
  return tasks;
}

// Groups of contexts side by side; how = null: hard masks.
inline void LkvTrainer::run(std::span<StudentTask> tasks, const StudentMasks* how) {
  const auto size = static_cast<std::size_t>(recipe_.group);
  const std::size_t groups = (tasks.size() + size - 1) / size;
  student(groups - 1);
  if (group_gradients_.size() < groups) group_gradients_.resize(groups);
  parallel_for(exec_, static_cast<std::int64_t>(groups), [&](std::int64_t item) {
    const auto g = static_cast<std::size_t>(item);
    const auto own = tasks.subspan(g * size, std::min(size, tasks.size() - g * size));
    if (!how) return students_[g]->measure(parameters_, own);
    group_gradients_[g].assign(parameters_.size(), 0.f);
    students_[g]->train(parameters_, *how, recipe_.beta, own, group_gradients_[g]);
  });
  if (!how) return;
  gradients_.assign(parameters_.size(), 0.f);
  for (std::size_t g = 0; g < groups; ++g)
    for (std::size_t i = 0; i < gradients_.size(); ++i) gradients_[i] += group_gradients_[g][i];
}

inline void LkvTrainer::head_gradients(std::span<const StudentTask> tasks, std::span<const double> retains) {
  if (recipe_.budgets == BudgetForm::uniform) return;
  const auto heads = static_cast<std::size_t>(layout_.sizes().heads());
  const index_t tokens = tasks.front().teacher->tokens;  // a step has contexts of one length
  const std::vector<double> scores = budget_scores(tokens);
  std::vector<double> out(heads), grad(heads), sum(heads, 0.0);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const double threshold = head_ratios(scores, retains[i], out);
    head_ratios_backward(scores, threshold, tasks[i].grad_ratios, grad);
    for (std::size_t h = 0; h < heads; ++h) sum[h] += grad[h];
  }
  head_scores_backward(layout_.head_net(std::as_const(parameters_).data()), sum, layout_.head_net(gradients_.data()));
  length_scores_backward(std::span<const double>(sum), std::vector<index_t>(heads, tokens),
                         layout_.length_slopes(gradients_.data()));
}

inline TrainingStep LkvTrainer::step() {
  if (finished()) fail_argument("LKV training: all ", recipe_.steps, " steps are done");
  const std::int64_t n = steps_done();
  TrainingStep out;
  out.step = n;
  out.temperature = ExponentialSchedule{recipe_.tau, recipe_.tau_end}.at(n, recipe_.steps);
  out.retain = ExponentialSchedule{recipe_.retain, recipe_.retain_end}.at(n, recipe_.steps);
  const auto warm_up = static_cast<std::int64_t>(std::llround(recipe_.warm_up * static_cast<double>(recipe_.steps)));
  out.rate = LinearWarmUpSchedule{recipe_.lr, recipe_.lr_end, warm_up}.at(n, recipe_.steps);

  prepared_scale();
  std::vector<StudentTask> tasks = draw(n, out.retain);
  const CounterRandom noise(recipe_.seed, noise_stream);
  const StudentMasks how{recipe_.threshold, out.temperature, recipe_.noise ? &noise : nullptr};
  try {
    run(tasks, &how);
  } catch (const std::domain_error& e) {
    fail_domain("LKV training: step ", n, ": ", e.what());
  }
  for (const StudentTask& t : tasks) {
    out.kl += t.loss.kl;
    out.hidden += t.loss.hidden;
    out.score_deviation += t.score_deviation / static_cast<double>(tasks.size());
    out.empty_heads = std::max(out.empty_heads, t.empty_heads);
  }
  out.context_tokens = tasks.front().teacher->tokens;
  const auto r = ratios(out.retain, out.context_tokens);
  out.min_ratio = *std::min_element(r.begin(), r.end());
  out.max_ratio = *std::max_element(r.begin(), r.end());
  if (!std::isfinite(out.kl) || !std::isfinite(out.hidden))
    fail_domain("LKV training: step ", n, ": the loss is not finite (KL ", out.kl, ", hidden states ", out.hidden, ")");
  head_gradients(tasks, retains_);
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (!std::isfinite(gradients_[i]))
      fail_domain("LKV training: step ", n, ": the gradient of ", tensor_name(i), " is ", gradients_[i]);
  out.gradient_norm = adam_.step(parameters_, gradients_, out.rate);
  return out;
}

inline DistillationLoss LkvTrainer::hard_loss(double retain) {
  DistillationLoss out;
  auto& entries = set_.held_out();
  if (entries.empty()) return {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};
  std::vector<StudentTask> tasks;
  for (auto& e : entries) {
    StudentTask& t = tasks.emplace_back();
    t.teacher = &set_.teacher(exec_, e);
    t.probe = t.teacher->probes.empty() ? -1 : 0;
    t.weight = 1 / static_cast<double>(entries.size());
    t.ratios = ratios(retain, t.teacher->tokens);
  }
  run(tasks, nullptr);
  for (const StudentTask& t : tasks) {
    out.kl += t.loss.kl;
    out.hidden += t.loss.hidden;
  }
  return out;
}

inline std::string LkvTrainer::tensor_name(std::size_t parameter) const {
  const auto at = static_cast<std::int64_t>(parameter);
  if (at < layout_.head_size()) return "lkv_h";
  const std::int64_t head = (at - layout_.head_size()) / layout_.token_size(),
                     inside = (at - layout_.head_size()) % layout_.token_size(),
                     first = std::int64_t{layout_.sizes().token_inputs()} * layout_.sizes().token_hidden;
  const char* part = inside < first ? "w1" : inside < first + layout_.sizes().token_hidden ? "b1" : "w2";
  return joined_text("lkv_t.", part, " of layer ", head / layout_.sizes().kv_heads, ", head ",
                     head % layout_.sizes().kv_heads);
}

inline void LkvTrainer::save(const std::filesystem::path& path) {
  const InputScale& scale = prepared_scale();
  SafetensorsWriter out;
  out.metadata("format", "kvevict-lkv-training");
  out.metadata("version", "2");
  out.metadata("recipe", recipe_.text());
  out.metadata("data", set_.fingerprint());
  out.metadata("weights", std::to_string(teacher_->fingerprint()));
  out.metadata("steps_done", std::to_string(steps_done()));
  out.metadata("digest",
               detail::state_digest(steps_done(), {parameters_, adam_.mean, adam_.square, scale.mean, scale.inverse}));
  const auto add = [&](const char* name, const auto& v) { out.add(name, {std::ssize(v)}, std::span<const float>(v)); };
  add("parameters", parameters_);
  add("adam.mean", adam_.mean);
  add("adam.square", adam_.square);
  add("scale.mean", scale.mean);
  add("scale.inverse", scale.inverse);
  out.write(path);
}

inline void LkvTrainer::resume(const std::filesystem::path& path) {
  const Safetensors file(path);
  const Metadata meta(file);
  meta.require_format("kvevict-lkv-training", "2");
  if (meta.text("recipe") != recipe_.text())
    meta.fail("recipe", "another one: " + meta.text("recipe") + "; this run has " + recipe_.text());
  if (meta.text("data") != set_.fingerprint())
    meta.fail("data", "the state was made with other contexts than those of the given task files");
  if (meta.text("weights") != std::to_string(teacher_->fingerprint()))
    meta.fail("weights", "the state was made with another model");
  const auto values = [&](const char* name, const auto& current) {
    const TensorView& tensor = file.at(name);
    require_shape(tensor, {std::ssize(current)});
    return tensor.as<float>();
  };
  const auto parameters = values("parameters", parameters_), mean = values("adam.mean", adam_.mean),
             square = values("adam.square", adam_.square), scale_mean = values("scale.mean", scale_.mean),
             scale_inverse = values("scale.inverse", scale_.inverse);
  const std::int64_t steps = meta.count("steps_done", 0);
  if (meta.text("digest") != detail::state_digest(steps, {parameters, mean, square, scale_mean, scale_inverse}))
    meta.fail("digest", "does not fit the tensors and steps_done: the file is damaged; take an older state");
  parameters_.assign(parameters.begin(), parameters.end());
  adam_.mean.assign(mean.begin(), mean.end());
  adam_.square.assign(square.begin(), square.end());
  scale_.mean.assign(scale_mean.begin(), scale_mean.end());
  scale_.inverse.assign(scale_inverse.begin(), scale_inverse.end());
  scaled_ = true;
  adam_.steps = steps;
}

}  // namespace kvevict::inline KVEVICT_ABI
