// The commands on a live model, with a tiny random one: eval and record, and how they fail.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/run_tool.hpp"
#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/file_lock.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::contains;
using kvevict::testing::run_tool;
using kvevict::testing::TaskFile;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;
using kvevict::testing::ToolResult;
using json = nlohmann::json;

namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_text(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::vector<index_t> some_tokens(index_t count, index_t seed) {
  std::vector<index_t> out;
  for (index_t i = seed; i < seed + count; ++i) out.push_back((i * i * 7 + i * 3) % 50);
  return out;
}

// A model folder `model` and `tasks.safetensors`: two contexts of 40 tokens around one of 60.
struct Workplace {
  TempDir dir;
  Workplace() {
    std::filesystem::create_directory(dir / "model");
    TinyModel{}.fill().write(dir / "model");
    TaskFile f;
    f.context(some_tokens(40, 0), some_tokens(6, 900));
    f.context(some_tokens(60, 50), some_tokens(6, 920));
    f.context(some_tokens(40, 150), some_tokens(6, 940));
    f.probe(0, {1, 2}, {3, 4}).probe(0, {5}, {6}).probe(1, {7}, {8}).probe(2, {9, 10}, {11});
    f.write(tasks());
  }
  std::string path(const char* name) const { return (dir / name).string(); }
  std::string tasks() const { return path("tasks.safetensors"); }

  ToolResult eval(std::vector<std::string> more) const {
    std::vector<std::string> arguments{"eval", "--model", path("model"), "--tasks", tasks()};
    if (std::find(more.begin(), more.end(), "--format") == more.end()) more.insert(more.end(), {"--format", "json"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_tool(arguments);
  }
  json rows(std::vector<std::string> more) const {
    const auto r = eval(std::move(more));
    REQUIRE_MESSAGE(r.status == 0, r.err);
    return json::parse(r.out)["rows"];
  }
};

// An LKV checkpoint for the tiny model, with numbers that depend on the seed.
void write_checkpoint(const std::string& path, int seed) {
  LkvSizes sizes;
  sizes.layers = 3;
  sizes.kv_heads = 2;
  sizes.head_dim_k = sizes.head_dim_v = 8;
  sizes.head_width = sizes.head_hidden = sizes.token_hidden = 3;
  const auto numbers = [&](std::int64_t count) {
    std::vector<float> out;
    for (std::int64_t i = 0; i < count; ++i) out.push_back(static_cast<float>((i * 37 + seed * 11) % 17 - 8) * 0.1f);
    return out;
  };
  const auto heads = sizes.heads();
  const auto e = numbers(heads * 3), w1 = numbers(9), b1 = numbers(3), w2 = numbers(3);
  const auto t1 = numbers(heads * sizes.token_inputs() * 3), tb = numbers(heads * 3), t2 = numbers(heads * 3);
  write_lkv_checkpoint(path, sizes, {e, w1, b1, w2, t1, tb, t2}, {{"model", "tiny"}});
}

json without_seconds(json rows) {
  for (auto& r : rows) r.erase("seconds");
  return rows;
}

}  // namespace

TEST_CASE("eval writes one row per policy and ratio with exactly the fields that are documented") {
  const Workplace w;
  const auto r = w.eval({"--policy", "streamingllm,snapkv", "--retain", "1,0.25"});
  REQUIRE_MESSAGE(r.status == 0, r.err);
  const json result = json::parse(r.out);
  CHECK(result["format"] == "kvevict-eval");
  CHECK(result["version"] == 2);
  REQUIRE(result["rows"].size() == 4);
  const std::set<std::string> fields{"tasks",
                                     "policy",
                                     "spec",
                                     "retain",
                                     "contexts",
                                     "probes",
                                     "kl_answer",
                                     "kl_continuation",
                                     "nll_continuation",
                                     "nll_continuation_full",
                                     "accuracy",
                                     "rows_kept_fraction",
                                     "peak_rows_fraction",
                                     "seconds",
                                     "budget",
                                     "total_asked",
                                     "rows_full",
                                     "rows_kept",
                                     "error"};
  for (const auto& row : result["rows"]) {
    std::set<std::string> got;
    for (const auto& [key, value] : row.items()) got.insert(key);
    CHECK(got == fields);
    CHECK(row["tasks"] == w.tasks());
    CHECK(row["contexts"] == 3);
    CHECK(row["probes"] == 4);
    if (row["retain"] == 1) {
      CHECK(row["kl_answer"].get<double>() == 0);
      CHECK(row["kl_continuation"].get<double>() == 0);
      CHECK(row["nll_continuation"] == row["nll_continuation_full"]);
      CHECK(row["peak_rows_fraction"] == 1);
    } else {
      CHECK(row["kl_continuation"].get<double>() > 0);
      CHECK(row["rows_kept_fraction"] == 0.25);
      CHECK(row["peak_rows_fraction"].get<double>() == doctest::Approx(0.25 * 2 / 3 + 1. / 3));  // 3 layers
    }
  }
  CHECK(result["rows"][0]["policy"] == "streamingllm");
  CHECK(contains(result["rows"][1]["spec"], "uniform(exact=true,rounding=floor)/snapkv(window=32"));
}

TEST_CASE("eval chooses contexts by length and number, and limits probes and continuation") {
  const Workplace w;
  const auto row = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--policy", "knorm", "--retain", "0.3"});
    return without_seconds(w.rows(std::move(more)))[0];
  };
  CHECK(row({"--context-tokens", "40"})["contexts"] == 2);
  CHECK(row({"--context-tokens", "40"})["probes"] == 3);
  CHECK(row({"--context-tokens", "60"})["probes"] == 1);
  CHECK(row({"--limit", "2"})["contexts"] == 2);
  CHECK(row({"--context-tokens", "40", "--limit", "1"}) == row({"--limit", "1"}));
  CHECK(row({"--limit", "1", "--probes", "1"})["probes"] == 1);
  CHECK(row({"--limit", "1", "--continuation", "3"})["kl_continuation"] != row({"--limit", "1"})["kl_continuation"]);
  const auto none = w.eval({"--policy", "knorm", "--context-tokens", "41"});
  CHECK(none.status == 1);
  CHECK(contains(none.err, "has no context of 41 tokens"));
}

TEST_CASE("the grid of allocators and scorers, csv and the table") {
  const Workplace w;
  const auto rows = w.rows({"--allocator", "uniform,ada(floor=0.2)", "--scorer", "keydiff,knorm", "--retain", "0.3"});
  REQUIRE(rows.size() == 4);
  CHECK(rows[1]["policy"] == "uniform/knorm");
  CHECK(rows[2]["policy"] == "ada(floor=0.2)/keydiff");
  const auto csv = w.eval({"--policy", "knorm", "--retain", "0.3", "--format", "csv"});
  CHECK(contains(csv.out, "tasks,policy,spec,retain,contexts,probes,kl_answer,kl_continuation,nll_continuation,"));
  const auto table = w.eval({"--policy", "knorm", "--retain", "0.3", "--format", "table"});
  CHECK(contains(table.out, "3 contexts, 4 probes"));
  CHECK(contains(table.out, "KL answer"));
}

TEST_CASE("an interrupted eval goes on where it stopped, and the result is that of the unbroken run") {
  const Workplace w;
  TaskFile f;
  f.context(some_tokens(40, 0), some_tokens(6, 900));
  f.context(some_tokens(60, 50), some_tokens(6, 920));
  f.context(some_tokens(401, 0), some_tokens(6, 930));  // more than the model can take: the run ends here
  f.context(some_tokens(40, 150), some_tokens(6, 940));
  f.probe(0, {1, 2}, {3, 4}).probe(0, {5}, {6}).probe(1, {7}, {8}).probe(3, {9, 10}, {11});
  f.write(w.tasks());
  const std::vector<std::string> what{"--policy", "knorm,snapkv", "--retain", "0.4,0.2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), what.begin(), what.end());
    return more;
  };
  const json unbroken = without_seconds(w.rows(with({"--context-tokens", "40"})));

  const auto broken = w.eval(with({"--state", w.path("state")}));
  CHECK(broken.status == 1);
  REQUIRE(std::filesystem::exists(w.path("state")));
  CHECK_FALSE(std::filesystem::exists(w.path("state.lock")));
  json state = json::parse(content_of(w.path("state")));
  CHECK(state["contexts"].size() == 2);
  const auto resume = with({"--context-tokens", "40", "--state", w.path("state")});
  CHECK(without_seconds(w.rows(resume)) == unbroken);
  CHECK_FALSE(std::filesystem::exists(w.path("state")));

  // What is finished is not computed again: a changed number comes through.
  json changed = state;
  changed["contexts"][0]["results"][0][3] = 1000.;
  write_text(w.path("state"), changed.dump());
  CHECK(w.rows(resume)[0]["kl_continuation"].get<double>() > 300);

  // Another policy, another ratio, other contents of a file: no mixture of runs.
  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& message) {
    write_text(w.path("state"), state.dump());
    const auto r = w.eval(arguments);
    CHECK(r.status == 1);
    CHECK_MESSAGE(contains(r.err, message), r.err);
  };
  refused({"--policy", "knorm,keydiff", "--retain", "0.4,0.2", "--state", w.path("state")},
          "differs in 'policies'; remove it to begin anew");
  refused({"--policy", "knorm,snapkv", "--retain", "0.4", "--state", w.path("state")}, "differs in 'budgets'");
  const std::string config = content_of(w.path("model/config.json"));
  write_text(w.path("model/config.json"), config + "\n");
  refused(resume, "differs in 'contents of the model's config.json'");
  write_text(w.path("model/config.json"), config);
  const std::string weights = content_of(w.path("model/model.safetensors"));
  std::string other = weights;
  other[other.size() - 7] ^= 1;  // of the same size, and as old
  const auto time = std::filesystem::last_write_time(w.path("model/model.safetensors"));
  write_text(w.path("model/model.safetensors"), other);
  std::filesystem::last_write_time(w.path("model/model.safetensors"), time);
  refused(resume, "differs in 'contents of the model's model.safetensors'");
  write_text(w.path("model/model.safetensors"), weights);
  f.probe(3, {9}, {11}).write(w.tasks());
  refused(resume, "differs in 'contents of the tasks'");

  write_text(w.path("state"), state.dump().substr(0, 100));
  CHECK(contains(w.eval(resume).err, "is not valid JSON"));
}

TEST_CASE("a damaged state, and one of a run with another checkpoint, are refused") {
  const Workplace w;
  const std::string lkv = "lkv(file=\"" + w.path("lkv.safetensors") + "\")";
  TaskFile f;
  f.context(some_tokens(40, 0), some_tokens(6, 900)).context(some_tokens(401, 0), some_tokens(6, 930)).write(w.tasks());
  write_checkpoint(w.path("lkv.safetensors"), 1);
  const std::vector<std::string> run{"--policy", lkv + ",knorm", "--retain", "0.4", "--state", w.path("state")};
  CHECK(w.eval(run).status == 1);
  const json state = json::parse(content_of(w.path("state")));
  auto resume = run;
  resume.insert(resume.end(), {"--limit", "1"});
  const json rows = w.rows(resume);
  REQUIRE_MESSAGE(rows[0]["error"].is_null(), rows[0].dump());
  CHECK(rows[0]["kl_continuation"] != rows[1]["kl_continuation"]);

  json short_one = state;
  short_one["contexts"][0]["results"].erase(0);
  write_text(w.path("state"), short_one.dump());
  CHECK(contains(w.eval(resume).err, "1 results of a context; 2 are required"));

  write_text(w.path("state"), state.dump());
  write_checkpoint(w.path("lkv.safetensors"), 2);
  const auto r = w.eval(resume);
  CHECK(r.status == 1);
  CHECK_MESSAGE(contains(r.err, "differs in 'contents of " + w.path("lkv.safetensors") + "'"), r.err);
}

TEST_CASE("one evaluation at a time works on a state") {
  const Workplace w;
  const FileLock other(w.path("state"));
  const auto r = w.eval({"--policy", "knorm", "--state", w.path("state")});
  CHECK(r.status == 1);
  CHECK(contains(r.err, "another process"));
}

TEST_CASE("eval compares at equal totals, in ratios, rows and bytes, and a policy that fails stops no other") {
  const Workplace w;
  const json rows = w.rows({"--policy", "knorm,pyramidkv,adakv,snapkv-kvpress,knorm(exact=false)", "--retain", "0.33",
                            "--rows", "7", "--bytes", "9000"});
  REQUIRE(rows.size() == 15);
  // 3 layers of 2 heads; two contexts of 40 tokens and one of 60.
  for (std::size_t i = 0; i < 15; ++i) {
    const json& r = rows[i];
    CAPTURE(r.dump());
    CHECK(r["total_asked"] == rows[i / 5 * 5]["total_asked"]);
    if (i % 5 < 3) {
      CHECK(r["error"].is_null());
      CHECK(r["rows_kept"] == r["total_asked"]);
    }
  }
  CHECK(rows[0]["retain"] == 0.33);
  CHECK(rows[0]["total_asked"] == 2 * 79 + 118);
  CHECK(rows[5]["retain"].is_null());
  CHECK(rows[5]["budget"] == "7 rows per head");
  CHECK(rows[5]["total_asked"] == 3 * 42);
  CHECK(rows[10]["budget"] == "9000 bytes");
  CHECK(rows[4]["rows_kept"] < rows[4]["total_asked"]);
  // Rounded as kvpress rounds: a ratio is measured, rows are not.
  CHECK(rows[3]["error"].is_null());
  CHECK(contains(rows[8]["error"], "needs a budget given as a ratio"));
  CHECK(rows[8]["kl_answer"].is_null());
  const auto table = w.eval({"--policy", "knorm,snapkv-kvpress", "--rows", "7", "--format", "table"});
  CHECK(table.status == 0);
  CHECK(contains(table.out, "not measured: snapkv-kvpress: "));
  const auto nothing = w.eval({"--policy", "snapkv-kvpress", "--rows", "7"});
  CHECK(nothing.status == 1);
  CHECK(contains(nothing.err, "nothing could be measured: snapkv-kvpress: "));
}

TEST_CASE("outputs are looked at before the work: not an input, not each other, and writable") {
  const Workplace w;
  const auto usage = [&](const ToolResult& r, const std::string& message) {
    CHECK(r.status == 2);
    CHECK_MESSAGE(contains(r.err, message), r.err);
  };
  const std::string weights = content_of(w.path("model/model.safetensors")), tasks = content_of(w.tasks());
  usage(w.eval({"--policy", "knorm", "--out", w.path("x"), "--state", w.path("./x")}), "are the same file");
  usage(w.eval({"--policy", "knorm", "--out", w.tasks()}), "is a file that this command reads");
  usage(w.eval({"--policy", "knorm", "--state", w.path("model/config.json")}), "is a file that this command reads");
  std::filesystem::create_symlink(w.tasks(), w.path("alias"));
  usage(w.eval({"--policy", "knorm", "--out", w.path("alias")}), "is a file that this command reads");
  std::filesystem::create_hard_link(w.path("model/model.safetensors"), w.path("twin"));
  write_text(w.path("ids.txt"), "1 2 3 4");
  const auto record = [&](const std::string& out, const std::string& description) {
    return run_tool({"record", "--model", w.path("model"), "--tokens", w.path("ids.txt"), "--prompt-len", "3", "--out",
                     out, "--description", description});
  };
  usage(record(w.path("twin"), ""), "is a file that this command reads");
  usage(record(w.path("model/model.safetensors"), ""), "is a file that this command reads");
  usage(record(w.path("ids.txt"), ""), "is a file that this command reads");
  usage(record(w.path("new"), "\xff\x1b"), "'\\xff\\x1b' is not UTF-8");
  const auto folder = w.eval({"--policy", "knorm", "--out", w.path("missing/result")});
  CHECK(folder.status == 1);
  CHECK(contains(folder.err, "missing/result: cannot be written"));
  CHECK_FALSE(std::filesystem::exists(w.path("x")));
  CHECK_FALSE(std::filesystem::exists(w.path("new")));
  CHECK(content_of(w.path("model/model.safetensors")) == weights);
  CHECK(content_of(w.tasks()) == tasks);
}

TEST_CASE("by default the state lies beside the result while a run is not over") {
  const Workplace w;
  const auto r = w.eval({"--policy", "knorm", "--retain", "0.4", "--out", w.path("result.json")});
  CHECK(r.status == 0);
  CHECK(r.out.empty());
  CHECK(json::parse(content_of(w.path("result.json")))["rows"].size() == 1);
  CHECK_FALSE(std::filesystem::exists(w.path("result.json.partial")));
}

TEST_CASE("eval refuses what it cannot do, saying what would be right") {
  const Workplace w;
  const auto oracle = w.eval({"--policy", "knorm,oracle"});
  CHECK(oracle.status == 2);
  CHECK(contains(oracle.err, "'oracle' looks at queries that come after eviction"));
  CHECK(w.eval({}).status == 2);
  CHECK(w.eval({"--policy", "knorm", "--retain", "1.5"}).status == 2);
  CHECK(w.eval({"--policy", "knorm", "--limit", "0"}).status == 2);
  CHECK(w.eval({"--policy", "knorm", "--continuation", "1"}).status == 2);
  CHECK(run_tool({"eval", "--policy", "knorm"}).status == 2);
  const auto folder = run_tool({"eval", "--model", w.path("nowhere"), "--policy", "knorm"});
  CHECK(folder.status == 1);
  CHECK(contains(folder.err, "kvevict: error: "));
  CHECK(contains(folder.err, "config.json"));

  TaskFile foreign;
  foreign.context({1, 2, 50}, {1, 2}).write(w.tasks());
  const auto ids = w.eval({"--policy", "knorm"});
  CHECK(ids.status == 1);
  CHECK(contains(ids.err, "entry 2 is 50; the model's vocabulary has 50 tokens"));
  TaskFile longer;
  longer.context(some_tokens(401, 0), {1, 2}).write(w.tasks());
  CHECK(contains(w.eval({"--policy", "knorm"}).err, "max_position_embeddings"));
}

TEST_CASE("record writes a dump that compare reads, with the layers, queries and type asked for") {
  const Workplace w;
  std::string ids = "[";
  for (const index_t t : some_tokens(48, 7)) ids += std::to_string(t) + ", ";
  write_text(w.path("ids.json"), ids + "1]\n");
  const std::vector<std::string> base{"record",       "--model", w.path("model"), "--tokens", w.path("ids.json"),
                                      "--prompt-len", "40",      "--out"};
  const auto record = [&](const char* name, std::vector<std::string> more) {
    std::vector<std::string> arguments = base;
    arguments.push_back(w.path(name));
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_tool(arguments);
  };
  const auto plain = record("plain.safetensors", {});
  REQUIRE_MESSAGE(plain.status == 0, plain.err);
  CHECK(contains(plain.out, "40 prompt and 9 continuation rows of 3 layers"));
  const Dump<fp16_t> dump(w.path("plain.safetensors"));
  CHECK(dump.info().prompt_len == 40);
  CHECK(dump.info().token_ids.size() == 49);
  CHECK(dump.info().model == "model");
  const auto compared = run_tool({"compare", w.path("plain.safetensors"), "--policy", "knorm", "--retain", "0.5"});
  CHECK_MESSAGE(compared.status == 0, compared.err);

  REQUIRE(
      record("some.safetensors", {"--layers", "0,2", "--dtype", "f32", "--window", "5", "--attention-sums"}).status ==
      0);
  const Dump<float> some(w.path("some.safetensors"));
  CHECK(some.info().layers == std::vector<index_t>{0, 2});
  CHECK(some.info().q_positions.size() == 5 + 9);
  CHECK(some.extra(1, "attn_sum") != nullptr);
  REQUIRE(record("all.safetensors", {"--all-queries", "--dtype", "bf16"}).status == 0);
  CHECK(Dump<bf16_t>(w.path("all.safetensors")).info().q_positions.size() == 49);

  // A dump or a task file can say which tokens.
  const auto from = [&](const std::string& file, std::vector<std::string> more) {
    std::vector<std::string> arguments{"record",   "--model", w.path("model"),
                                       "--tokens", file,      "--prompt-len",
                                       "40",       "--out",   w.path("again.safetensors")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_tool(arguments);
  };
  REQUIRE(from(w.path("plain.safetensors"), {}).status == 0);
  CHECK(content_of(w.path("again.safetensors")) == content_of(w.path("plain.safetensors")));
  REQUIRE(from(w.tasks(), {"--context", "1"}).status == 0);
  CHECK(Dump<fp16_t>(w.path("again.safetensors")).info().token_ids.size() == 66);
  CHECK(contains(from(w.tasks(), {"--context", "3"}).err, "has contexts 0 to 2"));
}

TEST_CASE("a record that fails leaves no file behind") {
  const Workplace w;
  const std::size_t before = w.dir.files();
  const auto fails = [&](const std::string& ids, const std::string& prompt_len, const std::string& message) {
    write_text(w.path("ids.txt"), ids);
    const auto r = run_tool({"record", "--model", w.path("model"), "--tokens", w.path("ids.txt"), "--prompt-len",
                             prompt_len, "--out", w.path("dump.safetensors")});
    CHECK(r.status == 1);
    CHECK_MESSAGE(contains(r.err, message), r.err);
    std::filesystem::remove(w.path("ids.txt"));
    CHECK(w.dir.files() == before);
  };
  fails("1 2 3 50", "3", "token 0 is 50; the vocabulary has 50");
  fails("1 2 -3", "3", "token 2 is -3");
  fails("1 2 x3", "3", "'x3' at byte 4 is not a whole number");
  fails("1 2 3", "4", "prompt_len 4; 1 to 3");
  fails("", "1", "prompt_len 1; 1 to 0");
}
