// The command line: which commands there are, and how failures become exit statuses.
#include "cli/tool.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <memory>
#include <utility>

#include "cli/commands.hpp"

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
  int status = 0;
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
        add_policies(c, o.policies);
        c.add_option("--retain", o.retains, "ratios kept / full, e.g. 0.05,0.15")->capture_default_str();
        c.add_option("--out", common.out, "write there instead of standard output");
      },
      compare, true);
  command(
      "score", "write the scores of a policy's scorer", ScoreOptions{},
      [&](CLI::App& c, ScoreOptions& o) {
        c.add_option("dump", o.dump, "dump file; the shipped one by default");
        c.add_option("--policy", o.policy, "whose scorer to use")->required();
        c.add_option("--out", common.out, "scores file (safetensors) to write; a summary is printed");
      },
      score, true);
  command(
      "plan", "make a plan: which rows of every head stay", PlanOptions{},
      [&](CLI::App& c, PlanOptions& o) {
        c.add_option("dump", o.dump, "dump file; the shipped one by default");
        c.add_option("--policy", o.policy, "the policy")->required();
        auto* retain = c.add_option("--retain", o.retain, "ratio kept / full");
        auto* rows = c.add_option("--rows", o.rows, "mean rows per head");
        auto* bytes = c.add_option("--bytes", o.bytes, "bytes of keys and values that may stay");
        retain->excludes(rows)->excludes(bytes);
        rows->excludes(bytes);
        c.add_option("--out", common.out, "plan file (safetensors) to write; a summary is printed");
      },
      make_plan, true);
  command(
      "inspect", "say what a file holds: dump, plan, scores, checkpoint, tasks", InspectOptions{},
      [&](CLI::App& c, InspectOptions& o) { c.add_option("file", o.file, "a safetensors file")->required(); }, inspect,
      false);
  app.add_subcommand("policies", "list presets, allocators and scorers with their parameters")->callback([&] {
    list_policies(registry, out);
  });

  try {
    std::reverse(arguments.begin(), arguments.end());  // the parser takes them from the back
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e, out, err);  // --help, --version
    err << "kvevict: error: " << e.what()
        << "\nkvevict --help lists the commands, kvevict COMMAND --help its options\n";
    status = 2;
  } catch (const usage_error& e) {
    err << "kvevict: error: " << e.what() << '\n';
    status = 2;
  } catch (const std::exception& e) {
    err << "kvevict: error: " << e.what() << '\n';
    status = 1;
  }
  return status;
}

int run(int argc, char** argv, const Registry& registry) {
  return run(std::vector<std::string>(argv + 1, argv + argc), registry, std::cout, std::cerr);
}

}  // namespace kvevict::tool
