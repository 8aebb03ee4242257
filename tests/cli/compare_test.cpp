// Comparisons that can be believed: one total for all, rows that say what is missing, several recordings, layers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/run_tool.hpp"
#include "common/synthetic_dump.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/plan_file.hpp"

using namespace kvevict;
using kvevict::testing::contains;
using kvevict::testing::run_tool;
using kvevict::testing::SyntheticDump;
using kvevict::testing::TempDir;
using json = nlohmann::json;

namespace {

const std::string shipped = std::string(KVEVICT_SOURCE_DIR) + "/examples/data/smollm2-512.safetensors";

json compare(const std::vector<std::string>& arguments) { return kvevict::testing::compare_json(arguments)["rows"]; }

// A recording of 2 layers with changed values.
std::string written(const TempDir& dir, const std::string& name, SyntheticDump dump = {},
                    const std::function<void(std::vector<DumpLayer<float>>&)>& edit = {}) {
  auto layers = dump.layers<float>();
  if (edit) edit(layers);
  write_dump(dir / name, dump.info(), layers);
  return (dir / name).string();
}

}  // namespace

TEST_CASE("every policy is compared at the same total, and its specification plans the same rows") {
  const TempDir dir;
  const json rows = compare({"--retain", "0.15,0.0517"});
  std::map<double, double> best, oracle;
  std::set<std::string> unequal;
  for (const json& r : rows) {
    CAPTURE(r.dump());
    CHECK(r["error"].is_null());
    const double retain = r["retain"];
    CHECK(r["total_asked"] == std::floor(std::round(retain * 1e6) * 46080 / 1e6));
    CHECK(r["oracle_gap"].get<double>() >= -1e-12);
    if (r["rows_kept"] != r["total_asked"]) unequal.insert(r["policy"]);
    else if (r["policy"] == "oracle") oracle[retain] = r["mass_recall"];
    else if (retain < 1) best[retain] = std::max(best[retain], r["mass_recall"].get<double>());
  }
  CHECK(unequal == std::set<std::string>{"snapkv-kvpress"});
  for (const auto& [retain, recall] : best) CHECK(recall <= oracle.at(retain) + 1e-12);

  const auto plan = dir / "plan.safetensors";
  for (const json& r : rows) {
    if (r["retain"] != 0.0517) continue;
    const std::string spec = r["spec"];
    if (r["policy"] != "snapkv-kvpress" && r["policy"] != "adakv" && r["policy"] != "oracle")
      CHECK(contains(spec, "exact=true"));
    CHECK(run_tool({"plan", shipped, "--policy", spec, "--retain", "0.0517", "--out", plan.string()}).status == 0);
    const EvictionPlan made = read_plan(plan);
    CHECK(made.rows_kept() == r["rows_kept"]);
    for (const json& layer : r["layers"])
      for (std::size_t h = 0; h < layer["per_head"].size(); ++h)
        CHECK(made.head(layer["layer"], static_cast<index_t>(h)).size() == layer["per_head"][h]);
  }
}

TEST_CASE("who keeps another total is measured and marked, never the best") {
  const auto table =
      run_tool({"compare", shipped, "--policy", "knorm(exact=false),random,snapkv-kvpress", "--retain", "0.15"});
  REQUIRE(table.status == 0);
  CHECK(contains(table.out, "knorm(exact=false)   0.150     6840 #"));
  CHECK(contains(table.out, "random               0.150     6912  "));
  CHECK(contains(table.out, "0.1169 *"));  // of random, the only one that keeps what was asked for
  CHECK(contains(table.out, "# cannot keep the 6912 rows that were asked for"));

  // Below one row per head: policies keep the minimum, and none of them is called the best.
  const json rows = compare({shipped, "--policy", "knorm", "--retain", "0.001"});
  CHECK(rows[1]["rows_kept"] == 46);
  CHECK(rows[2]["rows_kept"] == 90);
  CHECK(rows[2]["total_asked"] == 46);
  CHECK(rows[2]["oracle_gap"].get<double>() >= 0);
  const auto least = run_tool({"compare", shipped, "--policy", "knorm", "--retain", "0.001"});
  CHECK_FALSE(contains(least.out, "0 *"));
}

TEST_CASE("the bounds print no negative zero") {
  const auto table = run_tool({"compare", shipped, "--policy", "knorm", "--retain", "0.5"});
  CHECK_FALSE(contains(table.out, "-0.0000"));
}

TEST_CASE("budgets in rows and bytes stand beside ratios") {
  const TempDir dir;
  const std::string file = written(dir, "a.safetensors");  // 2 layers, 2 heads, 24 tokens, 64 bytes a row
  const json rows = compare({file, "--policy", "knorm", "--retain", "0.5", "--rows", "7,3", "--bytes", "1600"});
  REQUIRE(rows.size() == 1 + 4 * 2);
  const std::vector<std::pair<std::string, int>> want{
      {"retain 0.5", 48}, {"7 rows per head", 28}, {"3 rows per head", 12}, {"1600 bytes", 25}};
  for (std::size_t i = 0; i < want.size(); ++i)
    for (const std::size_t k : {1 + 2 * i, 2 + 2 * i}) {
      CHECK(rows[k]["budget"] == want[i].first);
      CHECK(rows[k]["rows_kept"] == want[i].second);
      CHECK(rows[k]["total_asked"] == want[i].second);
      CHECK(rows[k]["retain"].is_null() == (i > 0));
    }
  CHECK(contains(run_tool({"compare", file, "--policy", "knorm", "--rows", "7"}).out, "7 rows per head"));
  for (const char* bad : {"-1", "x", "1.5", "9999999999"})
    CHECK(run_tool({"compare", file, "--policy", "knorm", "--rows", bad}).status == 2);
  CHECK(run_tool({"compare", file, "--policy", "knorm", "--bytes", "-1"}).status == 2);
}

TEST_CASE("a policy that lacks an input has a row that says what would record it, and stops no other") {
  const TempDir dir;
  SyntheticDump plain;
  plain.extras = false;
  const std::string file = written(dir, "plain.safetensors", plain);
  const json rows = compare({file, "--policy", "expected,knorm,snapkv(window=9)", "--retain", "0.5"});
  REQUIRE(rows.size() == 5);
  CHECK(rows[3]["policy"] == "knorm");
  CHECK(rows[3]["error"].is_null());
  for (const char* field : {"rows_kept", "bytes_live", "bytes_reserved", "mass_recall", "output_error", "oracle_gap",
                            "plan_seconds", "layers"})
    CHECK(rows[2][field].is_null());
  CHECK(rows[2]["total_asked"] == 48);
  const std::string expected = rows[2]["error"], window = rows[4]["error"];
  CHECK(contains(expected, file));
  CHECK(contains(expected, "query statistics"));
  CHECK(contains(expected,
                 "`kvevict record --model MODEL --tokens " + file + " --prompt-len 24 --query-statistics --out"));
  CHECK(contains(window, "--window 9"));
  const auto table = run_tool({"compare", file, "--policy", "expected,knorm", "--retain", "0.5,0.25"});
  CHECK(table.status == 0);
  CHECK(contains(table.out, "not measured: expected: " + file));
  CHECK(table.out.find("not measured") == table.out.rfind("not measured"));  // once for both ratios

  const auto alone = run_tool({"compare", file, "--policy", "expected", "--retain", "0.5"});
  CHECK(alone.status == 1);
  CHECK(contains(alone.err, "nothing could be measured: expected: "));
  for (const char* command : {"score", "plan"}) {
    std::vector<std::string> arguments{command, file, "--policy", "expected"};
    if (arguments[0] == "plan") arguments.insert(arguments.end(), {"--retain", "0.5"});
    const auto r = run_tool(arguments);
    CHECK(r.status == 1);
    CHECK_MESSAGE(contains(r.err, "error: " + file), r.err);
    CHECK(contains(r.err, "--query-statistics"));
  }

  SyntheticDump shorter;
  shorter.continuation_len = 0;
  const auto none = run_tool({"compare", written(dir, "short.safetensors", shorter), "--policy", "knorm"});
  CHECK(none.status == 1);
  CHECK(contains(none.err, "records no continuation"));
  CHECK(contains(none.err, "--prompt-len 21 "));
}

TEST_CASE("several recordings: their rows, the mean, its standard error, and the best over all") {
  const TempDir dir;
  std::vector<std::string> files;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    SyntheticDump d;
    d.seed = seed;
    d.prompt_len = 20 + 4 * static_cast<index_t>(seed);
    files.push_back(written(dir, std::to_string(seed) + ".safetensors", d));
  }
  std::vector<std::string> arguments = files;
  arguments.insert(arguments.end(), {"--policy", "knorm,keydiff", "--retain", "0.5"});
  const json rows = compare(arguments);
  REQUIRE(rows.size() == 4 * 4);
  for (std::size_t p = 0; p < 4; ++p) {
    const json& mean = rows[12 + p];
    CHECK(mean["dump"].is_null());
    CHECK(mean["dumps"] == 3);
    CHECK(mean["policy"] == rows[p]["policy"]);
    CHECK(mean["layers"].is_null());
    double sum = 0, kept = 0, squares = 0;
    for (std::size_t d = 0; d < 3; ++d) {
      const json& one = rows[4 * d + p];
      CHECK(one["dump"] == files[d]);
      CHECK(one["dumps"] == 1);
      CHECK(one["mass_recall_stderr"].is_null());
      sum += one["mass_recall"].get<double>();
      kept += one["rows_kept"].get<double>();
    }
    for (std::size_t d = 0; d < 3; ++d) squares += std::pow(rows[4 * d + p]["mass_recall"].get<double>() - sum / 3, 2);
    CHECK(mean["mass_recall"].get<double>() == doctest::Approx(sum / 3));
    CHECK(mean["mass_recall_stderr"].get<double>() == doctest::Approx(std::sqrt(squares / 2 / 3)));
    CHECK(mean["rows_kept"] == kept);
  }
  arguments.insert(arguments.begin(), "compare");
  const auto table = run_tool(arguments);
  CHECK(contains(table.out, "mean of 3 recordings \u00b1 its standard error"));
  CHECK(table.out.find(" *", table.out.find("mean of 3")) != std::string::npos);

  // Measured on two of three is no mean.
  SyntheticDump plain;
  plain.extras = false;
  const json partly = compare(
      {files[0], files[1], written(dir, "plain.safetensors", plain), "--policy", "expected,knorm", "--retain", "0.5"});
  CHECK(contains(partly[14]["error"], "measured on 2 of 3 recordings"));
  CHECK(partly[14]["mass_recall"].is_null());
  CHECK(partly[15]["error"].is_null());
}

TEST_CASE("a value that is no number is named, and nothing is measured with it") {
  const TempDir dir;
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  // Head 1, token 13, element 3 of layer 1; rows are 28 with the continuation.
  const auto spoilt = [&](const char* name, auto member, float value) {
    return written(dir, name, {}, [&](auto& layers) { (layers[1].*member)[(1 * 28 + 13) * 8 + 3] = value; });
  };
  for (const auto& [file, what] : std::vector<std::pair<std::string, std::string>>{
           {spoilt("nan_v", &DumpLayer<float>::v, nan), "layer 1, head 1, token 13: element 3 of the value is nan"},
           {spoilt("inf_v", &DumpLayer<float>::v, -inf), "layer 1, head 1, token 13: element 3 of the value is -inf"},
           {spoilt("inf_k", &DumpLayer<float>::k, inf), "layer 1, head 1, token 13: element 3 of the key is inf"}}) {
    const auto r = run_tool({"compare", file, "--policy", "knorm,keydiff", "--retain", "0.5"});
    CHECK(r.status == 1);
    CHECK_MESSAGE(contains(r.err, "knorm: " + file + ": " + what), r.err);
    CHECK_FALSE(contains(r.out, "0.0000"));
    const auto table = run_tool({"compare", file, written(dir, "good"), "--policy", "knorm", "--retain", "0.5"});
    CHECK(table.status == 0);  // the other recording is measured
  }
  // Every head is spoilt; the first is named, with any number of threads and whatever the policy.
  const std::string every = written(dir, "every", {}, [&](auto& layers) {
    for (std::size_t h = 0; h < 2; ++h)
      for (auto& layer : layers) layer.k[(h * 28 + 5 + h) * 8] = nan;
  });
  for (const char* policy : {"knorm", "snapkv(window=6)", "expected", "keydiff", "adakv(window=6)"})
    for (const char* threads : {"1", "3"}) {
      const auto r = run_tool({"plan", every, "--policy", policy, "--retain", "0.5", "--threads", threads});
      CHECK(r.status == 1);
      CHECK_MESSAGE(contains(r.err, "layer 0, head 0, token 5: element 0 of the key is nan"), r.err);
      const std::string name = policy;
      CHECK(contains(r.err, name == "adakv(window=6)" ? "snapkv(" : name.substr(0, name.find('('))));
    }
}

TEST_CASE("layers on request, and always in json") {
  const TempDir dir;
  const std::string file = written(dir, "a.safetensors");
  const json rows = compare({file, "--policy", "adakv(window=6)", "--retain", "0.25"});
  const json& row = rows[2];
  REQUIRE(row["layers"].size() == 2);
  double recall = 0, error = 0;
  int kept = 0;
  for (const json& layer : row["layers"]) {
    recall += layer["mass_recall"].get<double>() / 2;
    error += layer["output_error"].get<double>() / 2;
    int in_layer = 0;
    for (const json& n : layer["per_head"]) in_layer += n.get<int>();
    CHECK(layer["rows_kept"] == in_layer);
    kept += in_layer;
  }
  CHECK(row["mass_recall"].get<double>() == doctest::Approx(recall));
  CHECK(row["output_error"].get<double>() == doctest::Approx(error));
  CHECK(row["rows_kept"] == kept);
  const auto table = run_tool({"compare", file, "--policy", "knorm", "--retain", "0.25", "--per-layer"});
  CHECK(contains(table.out, "knorm at retain 0.250 on " + file));
  CHECK(contains(table.out, "per head"));
  const auto csv =
      run_tool({"compare", file, "--policy", "knorm", "--retain", "0.25", "--per-layer", "--format", "csv"});
  CHECK(contains(csv.out, "dump,policy,spec,budget,layer,rows_kept,per_head,mass_recall,output_error"));
  CHECK(contains(csv.out, ",0,12,6 6,"));

  const auto plan = run_tool({"plan", file, "--policy", "knorm", "--rows", "6", "--format", "json"});
  const json layers = json::parse(plan.out)["layers"];
  REQUIRE(layers[1]["kept"].size() == 2);
  CHECK(layers[1]["kept"][0].size() == 6);
}

TEST_CASE("the learned policy is named so that its specification builds it elsewhere, with a digest beside it") {
  const auto r = run_tool({"compare", "--policy", "lkv", "--retain", "0.15", "--format", "json"});
  REQUIRE(r.status == 0);
  const json report = json::parse(r.out);
  const std::string spec = report["rows"][2]["spec"];
  CHECK(contains(spec, "lkv-h(file=\"shipped:lkv-smollm2\",exact=true)/lkv-t(file=\"shipped:lkv-smollm2\")"));
  CHECK_FALSE(contains(spec, KVEVICT_SOURCE_DIR));
  const std::string digest = report["files"]["shipped:lkv-smollm2"];
  CHECK(digest.size() == 22);
  CHECK(contains(run_tool({"inspect", std::string(KVEVICT_SOURCE_DIR) + "/examples/data/lkv-smollm2.safetensors"}).out,
                 digest));
  const auto absent = run_tool({"plan", "--policy", "lkv(file=\"shipped:nothing\")", "--retain", "0.1"});
  CHECK(absent.status == 1);
  CHECK(contains(absent.err, "shipped:nothing"));
}

TEST_CASE("foreign text reaches the terminal as one printable form") {
  const TempDir dir;
  const std::string name = (dir / "a\n\x1b[31mkvevict: error: forged\xff").string();
  const auto clean = [](const testing::ToolResult& r) {
    for (const std::string* text : {&r.out, &r.err})
      for (const char c : *text) {
        const auto byte = static_cast<unsigned char>(c);
        if ((byte < 0x20 && c != '\n') || byte == 0x7f || byte == 0xff) return false;
      }
    return r.err.find("\nkvevict: error") == r.err.npos;
  };
  CHECK(clean(run_tool({"inspect", name})));
  CHECK(contains(run_tool({"inspect", name}).err, "a\\n\\x1b[31mkvevict: error: forged\\xff: "));
  written(dir, name.substr(dir.path().string().size() + 1));
  for (const char* format : {"table", "csv", "json"}) {
    const auto r = run_tool({"compare", name, "--policy", "knorm", "--retain", "0.5", "--format", format});
    CHECK(r.status == 0);
    CHECK(clean(r));
    CHECK(clean(run_tool({"plan", name, "--policy", "knorm", "--retain", "0.5", "--format", format})));
  }
  CHECK(run_tool({"plan", name, "--policy", "knorm", "--retain", "0.5", "--out", (dir / "p").string()}).status == 0);
  CHECK(clean(run_tool({"inspect", name})));
  CHECK(clean(run_tool({"inspect", (dir / "p").string()})));
  CHECK(clean(run_tool({"compare", "--policy", "sna\x1b[31mp"})));
  CHECK(clean(run_tool({"compare", "--b\x1b[31mogus"})));
  CHECK(clean(run_tool({"compare", "--policy", "uniform/knorm(\u202e=1)"})));
}

TEST_CASE("recordings that are read give what mapped ones give") {
  const TempDir dir;
  const std::string file = written(dir, "a.safetensors");
  json mapped = compare({file, "--policy", "knorm,expected", "--retain", "0.5"}),
       read = compare({file, "--policy", "knorm,expected", "--retain", "0.5", "--no-mmap"});
  for (json* rows : {&mapped, &read})
    for (json& r : *rows) r.erase("plan_seconds");
  CHECK(mapped == read);
  CHECK(run_tool({"plan", file, "--policy", "knorm", "--retain", "0.5", "--no-mmap"}).status == 0);
  CHECK(run_tool({"score", file, "--policy", "knorm", "--no-mmap"}).status == 0);
}

TEST_CASE("csv cells that a spreadsheet would calculate are quoted") {
  const TempDir dir;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(dir.path());
  SyntheticDump{}.write<float>("=1+2.safetensors");
  const auto r = run_tool({"compare", "=1+2.safetensors", "--policy", "knorm", "--retain", "0.5", "--format", "csv"});
  std::filesystem::current_path(before);
  REQUIRE(r.status == 0);
  CHECK(contains(r.out, "\n\"'=1+2.safetensors\",knorm,"));
}

TEST_CASE("a standard output that is full is an error of every command") {
  const Registry registry = tool::standard_parts();
  std::ostream full(nullptr);
  for (const char* command : {"--help", "--version", "policies"}) {
    std::ostringstream err;
    CHECK(tool::run({command}, registry, full, err) == 1);
    CHECK(contains(err.str(), "standard output"));
  }
}

TEST_CASE("outputs of plan and score are not their inputs, and text stored is UTF-8") {
  const TempDir dir;
  const std::string file = written(dir, "a.safetensors");
  for (const char* command : {"plan", "score", "compare"}) {
    std::vector<std::string> arguments{command, file, "--policy", "knorm", "--out", file};
    if (arguments[0] == "plan") arguments.insert(arguments.end(), {"--retain", "0.5"});
    const auto r = run_tool(arguments);
    CHECK(r.status == 2);
    CHECK(contains(r.err, "is a file that this command reads"));
  }
  CHECK(testing::read_bytes(file).size() > 1000);
}
