// kvevict train lkv: budgets and scores learned through a model, into a checkpoint.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/files.hpp"
#include "cli/table.hpp"
#include "kvevict/core/printable.hpp"
#include "kvevict/io/file_lock.hpp"
#include "kvevict/io/json.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/naming/grammar.hpp"
#include "kvevict/train/trainer.hpp"

namespace kvevict::tool {
namespace {

// {"steps": 240, "key_frame": "pre-rope", ...}
void read_config(const std::filesystem::path& path, LkvRecipe& recipe) {
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path)) fail_format(path.string(), ": cannot be read as a file");
  const std::string content{std::istreambuf_iterator<char>(in), {}};
  const auto json = parse_json(content, path.string());
  if (!json.is_object()) fail_format(path.string(), ": an object {name: value} is required");
  for (const auto& [key, value] : json.items()) {
    if (value.is_structured() || value.is_null())
      fail_format(path.string(), ": field `", key, "`: a number, a word or true/false is required");
    try {
      recipe.set(key, value.is_string() ? value.get<std::string>() : value.dump());
    } catch (const std::invalid_argument& e) {
      fail_format(path.string(), ": field `", key, "`: ", e.what());
    }
  }
}

std::string line(const TrainingStep& s, const LkvRecipe& recipe, double left) {
  return joined_text("step ", s.step + 1, '/', recipe.steps, "  tau ", fixed(s.temperature, 4), "  retain ",
                     fixed(s.retain, 3), "  KL ", fixed(s.kl, 4), "  hidden ", fixed(s.hidden, 3), "  |g| ",
                     fixed(s.gradient_norm, 2), "  score std ", fixed(s.score_deviation, 2), "  ratios ",
                     fixed(s.min_ratio, 3), "..", fixed(s.max_ratio, 3), "  empty heads ", s.empty_heads, "  ",
                     s.context_tokens, " tokens  ", fixed(left, 0), " s left\n");
}

}  // namespace

std::vector<RecipeValue> train_lkv_values() {
  std::vector<RecipeValue> out;
  const LkvRecipe defaults;
  LkvRecipe::parameters(defaults, [&](std::string_view key, const auto& value) {
    out.push_back({std::string(key), print_value(value), value_kind(value)});
  });
  return out;
}

void train_lkv(const Common& common, const TrainLkvOptions& options) {
  LkvRecipe recipe;
  if (!options.config.empty()) read_config(options.config, recipe);
  for (const auto& [key, value] : options.values) {
    try {
      recipe.set(key, value);
    } catch (const std::invalid_argument& e) {
      throw usage_error(e.what());
    }
  }
  try {
    recipe.check();
  } catch (const std::invalid_argument& e) {
    throw usage_error(e.what());
  }
  require_utf8("--model-name", options.model_name);
  const std::filesystem::path out = common.out;
  if (out.empty()) fail_format("--out: is empty; the name of the checkpoint to write is required");
  std::filesystem::path state = out;
  state += ".state";
  const std::string tasks = options.tasks.empty() ? shipped_data("train").string() : options.tasks;
  const std::vector<std::string> task_files = split_outside(tasks, ',');
  std::vector<std::string> inputs = files_in(options.model);
  inputs.insert(inputs.end(), task_files.begin(), task_files.end());
  inputs.push_back(options.config);
  check_outputs({{"--out", common.out}, {"its state", state.string()}}, inputs);  // now, not after the first steps
  const FileLock alone(out);
  const auto say = [&](const std::string& s) {
    if (!common.quiet) *common.errors << s << std::flush;
  };

  const auto note = [&](const std::string& s) { say("kvevict: note: " + printable(s) + '\n'); };
  std::vector<Tasks> files;
  for (const std::string& f : task_files) files.emplace_back(f);
  LkvTeacher teacher(options.model);
  LkvTrainer trainer(common.exec(), teacher, files, recipe, TeacherFolder(options.cache, note));
  if (std::filesystem::exists(state)) {
    trainer.resume(state);
    say(joined_text("going on from ", printable(state.string()), " after step ", trainer.steps_done(), '\n'));
  }

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const std::int64_t first = trainer.steps_done();
  while (!trainer.finished()) {
    const TrainingStep s = trainer.step();
    const std::int64_t done = trainer.steps_done();
    if (done % options.report == 0 || done == 1 || trainer.finished())
      say(line(s, recipe, seconds() / static_cast<double>(done - first) * static_cast<double>(recipe.steps - done)));
    if (options.check > 0 && trainer.contexts_held_out() > 0 && (done % options.check == 0 || trainer.finished())) {
      const DistillationLoss hard = trainer.hard_loss(recipe.retain_end);
      say(joined_text("  hard loss at retain ", fixed(recipe.retain_end, 3), ": KL ", fixed(hard.kl, 4), "  hidden ",
                      fixed(hard.hidden, 3), '\n'));
    }
    if (done % options.save == 0 && !trainer.finished()) trainer.save(state);
  }
  const ExportedLkv weights = trainer.weights();
  const std::filesystem::path folder(options.model);
  const std::string name = printable((folder.has_filename() ? folder : folder.parent_path()).filename().string());
  write_lkv_checkpoint(out, weights.sizes, weights.tensors(),
                       {{"model", options.model_name.empty() ? name : options.model_name}, {"recipe", recipe.text()}},
                       options.half);
  std::filesystem::remove(state);
  say(joined_text("wrote ", printable(out.string()), " after ", fixed(seconds(), 0), " s\n"));
}

}  // namespace kvevict::tool
