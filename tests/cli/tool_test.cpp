// The tool as a person uses it: what it prints, what it writes, how it fails.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cli/run_tool.hpp"
#include "common/synthetic_dump.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/plan_file.hpp"
#include "kvevict/io/scores_file.hpp"

using namespace kvevict;
using kvevict::testing::compare_json;
using kvevict::testing::contains;
using kvevict::testing::run_tool;
using kvevict::testing::SyntheticDump;
using kvevict::testing::TempDir;
using json = nlohmann::json;

namespace {

const std::string dump = std::string(KVEVICT_SOURCE_DIR) + "/examples/data/smollm2-512.safetensors";

}  // namespace

TEST_CASE("compare meets the reference values of the embedded dump, and no policy beats the oracle") {
  std::ifstream file(std::string(KVEVICT_TEST_DATA) + "/metrics-smollm2-512.json");
  const json reference = json::parse(file);
  const json result = compare_json({"--policy",
                                    "snapkv(exact=false),knorm(exact=false),keydiff(exact=false),"
                                    "streamingllm(exact=false),random(exact=false),adakv",
                                    "--retain", "0.15,0.3"});
  CHECK(result["format"] == "kvevict-compare");
  CHECK(result["version"] == 2);
  const std::set<std::string> fields{"dump",
                                     "policy",
                                     "spec",
                                     "retain",
                                     "rows_full",
                                     "rows_kept",
                                     "bytes_full",
                                     "bytes_live",
                                     "bytes_reserved",
                                     "mass_recall",
                                     "output_error",
                                     "oracle_gap",
                                     "plan_seconds",
                                     "budget",
                                     "total_asked",
                                     "error",
                                     "dumps",
                                     "layers",
                                     "mass_recall_stderr",
                                     "output_error_stderr",
                                     "oracle_gap_stderr",
                                     "plan_seconds_stderr"};
  for (const auto& row : result["rows"]) {
    std::set<std::string> got;
    for (const auto& [key, value] : row.items()) got.insert(key);
    CHECK(got == fields);
    CHECK(row["rows_kept"].get<double>() <= std::floor(row["retain"].get<double>() * row["rows_full"].get<double>()));
    CHECK(row["oracle_gap"].get<double>() >= -1e-9);
    CHECK(row["bytes_live"].get<double>() == row["rows_kept"].get<double>() * 2 * 64 * 2);  // key and value, d 64, f16
  }
  for (const auto& want : reference["rows"]) {
    int found = 0;
    for (const auto& row : result["rows"])
      if (const std::string name = row["policy"];
          name.substr(0, name.find('(')) == want["policy"] && row["retain"] == want["retain"]) {
        ++found;
        INFO(row.dump());
        CHECK(std::abs(row["mass_recall"].get<double>() - want["mass_recall"].get<double>()) < 2e-3);
        CHECK(std::abs(row["output_error"].get<double>() - want["output_error"].get<double>()) < 4e-3);
      }
    CHECK(found == 1);
  }
  for (const double retain : {0.15, 0.3}) {
    double random = 0, oracle = 0, least = 1, most = 0;
    for (const auto& row : result["rows"])
      if (row["retain"] == retain) {
        const double recall = row["mass_recall"];
        if (row["policy"] == "random(exact=false)") random = recall;
        if (row["policy"] == "oracle") oracle = recall;
        least = std::min(least, recall);
        most = std::max(most, recall);
      }
    CHECK(oracle == most);
    CHECK(random == least);
  }
}

TEST_CASE("the full cache and the oracle stand in every comparison, asked or not, and once") {
  const json rows = compare_json({"--policy", "full,knorm,oracle", "--retain", "0.5"})["rows"];
  REQUIRE(rows.size() == 3);
  CHECK(rows[0]["policy"] == "full");
  CHECK(rows[0]["retain"] == 1);
  CHECK(rows[0]["rows_kept"] == rows[0]["rows_full"]);
  CHECK(rows[0]["output_error"] == 0.0);
  CHECK(rows[1]["policy"] == "oracle");
  CHECK(rows[2]["policy"] == "knorm");
  CHECK(compare_json({"--policy", "knorm", "--retain", "0.5"})["rows"].size() == 3);
}

TEST_CASE("U4: a grid names every pair, one row each") {
  TempDir dir;
  const auto file = dir.path() / "dump.safetensors";
  SyntheticDump{}.write<float>(file);
  const json rows =
      compare_json({file.string(), "--allocator", "uniform,ada(floor=0.5)", "--scorer",
                    "snapkv(window=4,group=max),snapkv(window=4,group=mean)", "--retain", "0.25,0.5"})["rows"];
  std::set<std::string> names;
  int pairs = 0;
  for (const auto& row : rows)
    if (row["policy"] != "full" && row["policy"] != "oracle") {
      names.insert(row["policy"].get<std::string>() + " at " + row["retain"].dump());
      ++pairs;
    }
  CHECK(pairs == 8);
  CHECK(names.size() == 8);
  CHECK(names.count("ada(floor=0.5)/snapkv(window=4,group=mean) at 0.25") == 1);
}

TEST_CASE("table and csv say the same as json, and --out writes a file instead") {
  TempDir dir;
  const auto file = dir.path() / "dump.safetensors";
  SyntheticDump{}.write<bf16_t>(file);
  const auto table = run_tool({"compare", file.string(), "--policy", "knorm,keydiff", "--retain", "0.5"});
  CHECK(table.status == 0);
  for (const char* part :
       {"policy", "live MiB", "reserved MiB", "mass recall", "plan ms", "knorm", "keydiff", "oracle", "full", " *"})
    CHECK_MESSAGE(contains(table.out, part), part);
  CHECK(table.out.find("\nfull ") < table.out.find("\noracle "));

  const auto out = dir.path() / "table.csv";
  const auto csv = run_tool(
      {"compare", file.string(), "--policy", "knorm", "--retain", "0.5", "--format", "csv", "--out", out.string()});
  CHECK(csv.status == 0);
  CHECK(csv.out.empty());
  std::ifstream read(out);
  std::string header, line;
  std::getline(read, header);
  CHECK(header.rfind("dump,policy,spec,retain,rows_full,rows_kept", 0) == 0);
  int lines = 0;
  while (std::getline(read, line)) ++lines;
  CHECK(lines == 3);
}

TEST_CASE("score writes every layer; group=none has a row per query head") {
  TempDir dir;
  const auto out = dir.path() / "scores.safetensors";
  CHECK(run_tool({"score", dump, "--policy", "snapkv-kvpress", "--out", out.string()}).status == 0);
  const Safetensors scores(out);
  CHECK(scores.metadata().at("format") == "kvevict-scores");
  CHECK(scores.tensors().size() == 30);
  CHECK(scores.at("layers.29.scores").shape == std::vector<std::int64_t>{3, 512});
  CHECK(run_tool({"score", dump, "--policy", "uniform/snapkv(group=none)", "--out", out.string()}).status == 0);
  const Safetensors per_query_head(out);
  CHECK(per_query_head.at("layers.0.scores").shape == std::vector<std::int64_t>{9, 512});
}

TEST_CASE("plan writes what it prints, and the specification in the file builds the same plan") {
  TempDir dir;
  const auto first = dir.path() / "a.safetensors", second = dir.path() / "b.safetensors";
  const auto r = run_tool({"plan", dump, "--policy", "adakv", "--retain", "0.05", "--out", first.string()});
  CHECK(r.status == 0);
  CHECK(contains(r.out, "audit: protection cut"));
  const EvictionPlan plan = read_plan(first);
  CHECK(plan.rows_kept() == 2304);  // floor(0.05 * 46080)
  CHECK(run_tool({"plan", dump, "--policy", plan.specification, "--retain", "0.05", "--out", second.string()}).status ==
        0);
  CHECK(same_rows(plan, read_plan(second)));
}

TEST_CASE("a budget may be given in rows or bytes; one is required and only one allowed") {
  const auto kept = [](std::vector<std::string> budget) {
    std::vector<std::string> arguments{"plan", dump, "--policy", "knorm", "--format", "json"};
    arguments.insert(arguments.end(), budget.begin(), budget.end());
    const auto r = run_tool(arguments);
    REQUIRE_MESSAGE(r.status == 0, r.err);
    return json::parse(r.out)["rows_kept"].get<int>();
  };
  CHECK(kept({"--rows", "64"}) == 64 * 90);
  CHECK(kept({"--bytes", std::to_string(64 * 90 * 256)}) == 64 * 90);
  CHECK(run_tool({"plan", dump, "--policy", "knorm"}).status == 2);
  CHECK(run_tool({"plan", dump, "--policy", "knorm", "--rows", "3", "--retain", "0.1"}).status == 2);
  const auto none = run_tool({"plan", dump, "--policy", "knorm", "--rows", "0"});
  CHECK(none.status == 1);
  CHECK(contains(none.err, "minimum is 1"));
}

TEST_CASE("wrong usage ends with status 2, failures with status 1, each with one message") {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{},
                                                                     {"compare", "--bogus"},
                                                                     {"compare", "--retain", "0"},
                                                                     {"compare", "--retain", "1.01"},
                                                                     {"compare", "--retain", "nan"},
                                                                     {"compare", "--format", "xml"},
                                                                     {"compare", "--allocator", "uniform"},
                                                                     {"score"}}) {
    const auto r = run_tool(arguments);
    CHECK(r.status == 2);
    CHECK(r.err.rfind("kvevict: error: ", 0) == 0);
    CHECK(r.out.empty());
  }
  for (const auto& [arguments, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"compare", "--policy", "snapvk"}, "snapkv"},
           {{"compare", "--policy", "uniform/snapkv(windo=3)"}, "window"},
           {{"compare", "/nonexistent/dump.safetensors"}, "/nonexistent/dump.safetensors"},
           {{"compare", "/tmp"}, "folder"}}) {
    const auto r = run_tool(arguments);
    INFO(r.err);
    CHECK(r.status == 1);
    CHECK(r.err.rfind("kvevict: error: ", 0) == 0);
    CHECK(contains(r.err, message));
    CHECK(r.out.empty());
  }
}

TEST_CASE("a failed command leaves no file behind") {
  TempDir dir;
  const auto out = dir.path() / "plan.safetensors";
  CHECK(run_tool({"plan", dump, "--policy", "uniform/snapkv(window=65)", "--retain", "0.5", "--out", out.string()})
            .status == 1);
  CHECK(run_tool({"plan", dump, "--policy", "knorm", "--retain", "0.5", "--out", "/nonexistent/p"}).status == 1);
  CHECK(std::filesystem::is_empty(dir.path()));
}

TEST_CASE("help, version, the list of policies and inspect") {
  CHECK(contains(run_tool({"--help"}).out, "compare"));
  CHECK(contains(run_tool({"compare", "--help"}).out, "--retain"));
  CHECK(contains(run_tool({"--version"}).out, "kvevict 0."));
  const auto policies = run_tool({"policies"});
  for (const char* name : {"snapkv", "ada", "uniform", "position", "pyramid"}) CHECK(contains(policies.out, name));
  CHECK(contains(run_tool({"--version"}).out, ", v0_"));
  const auto inspected = run_tool({"inspect", dump});
  CHECK(inspected.status == 0);
  for (const char* part : {"30 layers", "512 prompt rows", "64 continuation rows", "layers.29.q_cov", "[9, 64, 64]"})
    CHECK_MESSAGE(contains(inspected.out, part), part);
  const std::string data = KVEVICT_SOURCE_DIR "/examples/data/";
  // A file for a preset goes to both of its parts.
  const std::string paper = "file=\"" + data + "lkv-paper-smollm2.safetensors\"";
  const auto both = run_tool({"compare", "--policy", "lkv(" + paper + ")", "--retain", "0.15", "--format", "csv"});
  CHECK(contains(both.out, "lkv-paper-smollm2.safetensors\"\",exact=true)/lkv-t(file=\"\"" + data + "lkv-paper"));
  CHECK(contains(run_tool({"inspect", data + "dev.safetensors"}).out,
                 "90 contexts: 48 of 512 tokens, 28 of 1024 tokens, 14 of 2048 tokens, 275 probes"));
  CHECK(contains(run_tool({"inspect", data + "lkv-smollm2.safetensors"}).out,
                 "LKV-T: hidden layer of 64, keys pre-rope, features distance"));
}
