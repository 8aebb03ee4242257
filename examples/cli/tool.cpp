// The command line: which commands there are, and how failures become exit statuses.
#include "cli/tool.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <memory>
#include <utility>

#include "cli/commands.hpp"
#include "kvevict/core/printable.hpp"

namespace kvevict::tool {
namespace {

void add_common(CLI::App& command, Common& common, bool tabular) {
  if (tabular)
    command.add_option("--format", common.format, "table, csv or json")
        ->check(CLI::IsMember({"table", "csv", "json"}))
        ->capture_default_str();
  command.add_option("--threads", common.threads, "threads; all cores by default")->check(CLI::Range(1, 4096));
  command.add_flag("--quiet", common.quiet, "no progress on standard error");
}

void add_policies(CLI::App& command, PolicyOptions& options) {
  command.add_option("--policy", options.policies, "policies, e.g. snapkv,uniform/keydiff,ada<pyramid>/snapkv");
  command.add_option("--allocator", options.allocators, "with --scorer: every pair of these");
  command.add_option("--scorer", options.scorers, "with --allocator: every pair of these");
}

void add_access(CLI::App& command, Common& common) {
  command.add_flag("--no-mmap", common.no_mmap, "read recordings into memory: for files that may change meanwhile");
}

void add_budgets(CLI::App& command, BudgetOptions& options, const std::string& usual) {
  command.add_option("--retain", options.retains,
                     "ratios kept / full" + (usual.empty() ? "" : "; " + usual + " where no budget is given"));
  command.add_option("--rows", options.rows, "mean rows per head");
  command.add_option("--bytes", options.bytes, "bytes of keys and values that may stay");
}

void list_policies(const Registry& registry, std::ostream& out) {
  out << "presets:\n";
  for (const auto& [name, preset] : registry.presets())
    out << "  " << name << "  =  " << preset.text << "\n      " << preset.about << '\n';
  out << "allocators (allocator/scorer makes a policy):\n";
  for (const auto& name : registry.allocator_names())
    out << "  " << registry.allocator({name, {}, {}}).specification() << '\n';
  out << "scorers:\n";
  for (const auto& name : registry.scorer_names())
    out << "  " << registry.scorer({name, {}, {}}).specification() << '\n';
}

}  // namespace

int run(std::vector<std::string> arguments, const Registry& registry, std::ostream& out, std::ostream& err) {
  CLI::App app{"KV-cache eviction policies: compare, score and plan on recorded K/V/Q of a model, or on a live one"};
  app.name("kvevict");
  app.require_subcommand(1);
  app.set_version_flag("--version", version_text());

  Common common;
  common.registry = &registry;
  common.output = &out;
  common.errors = &err;
  const auto command = [&](const char* name, const char* about, auto options, auto add, auto body, bool tabular) {
    auto* sub = app.add_subcommand(name, about);
    auto shared = std::make_shared<decltype(options)>(std::move(options));
    add(*sub, *shared);
    add_common(*sub, common, tabular);
    sub->callback([&common, shared, body] { body(common, *shared); });
  };

  command(
      "compare", "compare policies on recorded dumps: a table (or csv, json)", CompareOptions{},
      [&](CLI::App& c, CompareOptions& o) {
        c.add_option("dumps", o.dumps, "dump files; the shipped one by default");
        add_access(c, common);
        add_policies(c, o.policies);
        add_budgets(c, o.budgets, compare_retains);
        c.add_flag("--per-layer", o.per_layer,
                   "table and csv: rows per head and measures of every layer (json has them)");
        c.add_option("--out", common.out, "write there instead of standard output");
      },
      compare, true);
  command(
      "score", "write the scores of a policy's scorer", ScoreOptions{},
      [&](CLI::App& c, ScoreOptions& o) {
        c.add_option("dump", o.dump, "dump file; the shipped one by default");
        add_access(c, common);
        c.add_option("--policy", o.policy, "whose scorer to use")->required();
        c.add_option("--out", common.out, "scores file (safetensors) to write; a summary is printed");
      },
      score, true);
  command(
      "plan", "make a plan: which rows of every head stay", PlanOptions{},
      [&](CLI::App& c, PlanOptions& o) {
        c.add_option("dump", o.dump, "dump file; the shipped one by default");
        add_access(c, common);
        c.add_option("--policy", o.policy, "the policy")->required();
        add_budgets(c, o.budget, "");
        c.add_option("--out", common.out, "plan file (safetensors) to write; a summary is printed");
      },
      make_plan, true);
  command(
      "inspect", "say what a file holds: dump, plan, scores, checkpoint, tasks", InspectOptions{},
      [&](CLI::App& c, InspectOptions& o) { c.add_option("file", o.file, "a safetensors file")->required(); }, inspect,
      false);
  command(
      "record", "run a model on given tokens and write a dump", RecordCommandOptions{},
      [&](CLI::App& c, RecordCommandOptions& o) {
        c.add_option("--model", o.model, "model folder (config.json and *.safetensors)")->required();
        c.add_option("--tokens", o.tokens, "token ids: text, a dump, or a task file (see --context)")->required();
        c.add_option("--prompt-len", o.prompt_len, "tokens of the prompt; the rest is its continuation")->required();
        c.add_option("--out", common.out, "dump to write")->required();
        c.add_option("--context", o.context, "context of a task file")->capture_default_str();
        c.add_option("--layers", o.layers, "layers to write, e.g. 0,14; all by default");
        c.add_option("--dtype", o.dtype, "f16, bf16 or f32")
            ->check(CLI::IsMember({"f16", "bf16", "f32"}))
            ->capture_default_str();
        c.add_option("--window", o.window, "newest prompt queries to write")->capture_default_str();
        c.add_flag("--all-queries", o.all_queries, "write every prompt query");
        c.add_flag("--attention-sums", o.attention_sums, "write the column sums of the prompt's attention");
        c.add_flag("--query-statistics", o.query_statistics, "write mean and covariance of the queries before RoPE");
        c.add_flag("--output-projection", o.output_projection, "write the output projection of each layer");
        c.add_option("--description", o.description, "text to store in the dump");
      },
      record_dump, false);
  command(
      "eval", "judge policies by what a model says after eviction", EvalOptions{},
      [&](CLI::App& c, EvalOptions& o) {
        c.add_option("--model", o.model, "model folder (config.json and *.safetensors)")->required();
        c.add_option("--tasks", o.tasks, "task file; the shipped one by default");
        add_policies(c, o.policies);
        add_budgets(c, o.budgets, eval_retains);
        c.add_option("--context-tokens", o.context_tokens, "only contexts of this length")->check(CLI::PositiveNumber);
        c.add_option("--limit", o.limit, "only the first contexts (of that length)")->check(CLI::PositiveNumber);
        c.add_option("--probes", o.probes, "most probes of a context; all by default")->check(CLI::PositiveNumber);
        c.add_option("--continuation", o.continuation,
                     "tokens of the continuation, of which all but the first are scored; all by default")
            ->check(CLI::Range(2, 1 << 20));
        c.add_option("--state", o.state,
                     "finished contexts, to go on with after an interruption; OUT.partial by default");
        c.add_option("--out", common.out, "write there instead of standard output");
      },
      eval, true);
  auto* train = app.add_subcommand("train", "train what is learned: train lkv")->require_subcommand(1);
  {
    auto* lkv = train->add_subcommand("lkv", "budgets and scores, through a frozen model");
    auto shared = std::make_shared<TrainLkvOptions>();
    lkv->add_option("--model", shared->model, "folder of the model")->required();
    lkv->add_option("--tasks", shared->tasks, "task files, comma separated; the shipped training tasks by default");
    lkv->add_option("--out", common.out, "checkpoint to write; its state while training lies beside it")->required();
    lkv->add_option("--config", shared->config, "JSON file of recipe values; flags win");
    lkv->add_option("--cache", shared->cache, "folder that keeps what the full model says about each context");
    lkv->add_option("--model-name", shared->model_name, "name to store; the folder's by default");
    lkv->add_option("--half", shared->half, "store float16")->capture_default_str();
    for (const auto& [flag, value] :
         {std::pair{"--report", &shared->report}, {"--check", &shared->check}, {"--save", &shared->save}})
      lkv->add_option(flag, *value, "every so many steps")->check(CLI::Range(1, 1000000))->capture_default_str();
    for (const RecipeValue& value : train_lkv_values()) {
      std::string flag = "--" + value.name;
      std::replace(flag.begin(), flag.end(), '_', '-');
      lkv->add_option_function<std::string>(
             flag, [shared, name = value.name](const std::string& v) { shared->values[name] = v; }, value.kind)
          ->default_str(value.usual)
          ->group("Recipe (docs/policies/lkv.md)");
    }
    add_common(*lkv, common, false);
    lkv->callback([&common, shared] { train_lkv(common, *shared); });
  }
  app.add_subcommand("policies", "list presets, allocators and scorers with their parameters")->callback([&] {
    list_policies(registry, out);
  });

  const auto fails = [&](const std::string& why, int with) {
    err << "kvevict: error: " << printable(why) << '\n';
    return with;
  };
  try {
    std::reverse(arguments.begin(), arguments.end());  // the parser takes them from the back
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) {
      fails(e.what(), 2);
      err << "kvevict --help lists the commands, kvevict COMMAND --help its options\n";
      return 2;
    }
    app.exit(e, out, err);  // --help, --version
  } catch (const usage_error& e) {
    return fails(e.what(), 2);
  } catch (const std::exception& e) {
    return fails(e.what(), 1);
  }
  out.flush();
  return out ? 0 : fails("standard output: writing failed", 1);
}

int run(int argc, char** argv, const Registry& registry) {
  return run(std::vector<std::string>(argv + 1, argv + argc), registry, std::cout, std::cerr);
}

}  // namespace kvevict::tool
