#include "kvevict/io/tasks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "common/task_file.hpp"
#include "common/temp_dir.hpp"

using namespace kvevict;
using kvevict::testing::TaskFile;
using kvevict::testing::TempDir;

namespace {

// Two contexts; the probes of context 1 stand around the one of context 0.
TaskFile two_contexts() {
  TaskFile f;
  f.context({1, 2, 3}, {4, 5}).context({6, 7, 8, 9}, {10, 11});
  f.probe(1, {20, 21}, {22}).probe(0, {23}, {24, 25}, 0, 1).probe(1, {26}, {27}, -1);
  return f;
}

bool equal(std::span<const index_t> a, const std::vector<index_t>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

std::string refusal(const std::function<void(TaskFile&)>& spoil) {
  const TempDir dir;
  TaskFile f = two_contexts();
  spoil(f);
  const auto path = f.write(dir / "tasks.safetensors");
  try {
    const Tasks tasks(path);
  } catch (const format_error& e) {
    return e.what();
  }
  return "accepted";
}

void must_say(const std::string& message, const std::vector<std::string>& parts) {
  for (const auto& part : parts) CHECK_MESSAGE(message.find(part) != std::string::npos, message, " | ", part);
}

}  // namespace

TEST_CASE("contexts, continuations and probes are read; probes go to their contexts in the order of the file") {
  const TempDir dir;
  const Tasks t(two_contexts().write(dir / "tasks.safetensors"));
  CHECK(t.model() == "tiny");
  CHECK(t.kinds() == std::vector<std::string>{"code", "city"});
  REQUIRE(t.contexts() == 2);
  CHECK(equal(t.context(0), {1, 2, 3}));
  CHECK(equal(t.context(1), {6, 7, 8, 9}));
  CHECK(equal(t.continuation(0), {4, 5}));
  CHECK(equal(t.continuation(1), {10, 11}));
  REQUIRE(t.probes(0).size() == 1);
  CHECK(equal(t.probes(0)[0].answer, {24, 25}));
  CHECK(t.probes(0)[0].kind == 1);
  CHECK(t.probes(0)[0].full == Probe::FullCache::fails);
  REQUIRE(t.probes(1).size() == 2);
  CHECK(equal(t.probes(1)[0].question, {20, 21}));
  CHECK(t.probes(1)[0].full == Probe::FullCache::answers);
  CHECK(equal(t.probes(1)[1].question, {26}));
  CHECK(t.probes(1)[1].full == Probe::FullCache::unchecked);
}

TEST_CASE("a file without probes is legal: continuations alone can be measured") {
  const TempDir dir;
  const Tasks t(TaskFile{}.context({1}, {2, 3}).write(dir / "tasks.safetensors"));
  CHECK(t.probes(0).empty());
}

TEST_CASE("broken files are refused with file, tensor, entry and what would be right") {
  must_say(refusal([](TaskFile& f) { f.metadata["format"] = "kvevict-dump"; }),
           {"tasks.safetensors: metadata 'format'", "'kvevict-tasks' is required"});
  must_say(refusal([](TaskFile& f) { f.metadata["version"] = "2"; }), {"version", "'2'"});
  must_say(refusal([](TaskFile& f) { f.tensors.erase("a_tokens"); }), {"tensor 'a_tokens' is missing"});
  must_say(refusal([](TaskFile& f) {
             f.tensors["a_offsets"].values = {0, 1, 1, 4};
           }),
           {"tensor 'a_offsets'", "entry 2: an answer without tokens"});
  must_say(refusal([](TaskFile& f) {
             f.tensors["a_offsets"].values = {0, 3, 1, 4};
           }),
           {"tensor 'a_offsets'", "entry 2 is 1; 3 to 4 is legal"});
  must_say(refusal([](TaskFile& f) { f.tensors["q_offsets"].values.back() = 3; }),
           {"tensor 'q_offsets'", "offsets from 0 to 4"});
  must_say(refusal([](TaskFile& f) { f.tensors["ctx_offsets"].values[0] = 1; }),
           {"tensor 'ctx_offsets'", "offsets from 0 to 7"});
  must_say(refusal([](TaskFile& f) { f.tensors["ctx_offsets"].values = {0, 0, 7}; }), {"a context without tokens"});
  must_say(refusal([](TaskFile& f) { f.tensors["ctx_tokens"].values[4] = -5; }),
           {"tensor 'ctx_tokens'", "entry 4 is -5"});
  must_say(refusal([](TaskFile& f) { f.tensors["probe_ctx"].values[1] = 2; }),
           {"tensor 'probe_ctx'", "probe 1 has 2; 0 to 1 is legal"});
  must_say(refusal([](TaskFile& f) { f.tensors["probe_kind"].values[0] = 2; }), {"probe_kind", "0 to 1 is legal"});
  must_say(refusal([](TaskFile& f) { f.tensors["probe_full_ok"].values[2] = -2; }),
           {"probe_full_ok", "-1 to 1 is legal"});
  must_say(refusal([](TaskFile& f) { f.tensors["probe_kind"] = {{2}, {0, 0}}; }), {"probe_kind", "[3] is required"});
  must_say(refusal([](TaskFile& f) { f.tensors["cont_tokens"] = {{1, 2}, {4, 5}}; }), {"cont_tokens", "[2, any]"});
  must_say(refusal([](TaskFile& f) { f.tensors["cont_tokens"] = {{2, 1}, {4, 5}}; }), {"cont_tokens", "at least 2"});
  must_say(refusal([](TaskFile& f) { f.tensors["a_offsets"] = {{3}, {0, 1, 4}}; }), {"2 answers for 3 questions"});
}

TEST_CASE("token ids beyond a model's vocabulary are named before anything runs") {
  const TempDir dir;
  const Tasks t(two_contexts().write(dir / "tasks.safetensors"));
  CHECK_NOTHROW(t.check_vocabulary(28));
  CHECK_THROWS_WITH_AS(t.check_vocabulary(27), doctest::Contains("tensor 'a_tokens': entry 3 is 27"), format_error);
  CHECK_THROWS_WITH(t.check_vocabulary(5), doctest::Contains("tensor 'ctx_tokens': entry 3 is 6"));
}

TEST_CASE("the shipped development set has 48, 28 and 14 contexts of 512, 1024 and 2048 tokens") {
  const Tasks t(KVEVICT_SOURCE_DIR "/examples/data/dev.safetensors");
  REQUIRE(t.contexts() == 90);
  std::size_t probes = 0;
  for (index_t c = 0; c < 90; ++c) {
    CHECK(t.context(c).size() == (c < 48 ? 512u : c < 76 ? 1024u : 2048u));
    CHECK(t.context(c)[0] == 1);
    CHECK(t.continuation(c).size() == 48);
    probes += t.probes(c).size();
  }
  CHECK(probes == 275);
  CHECK(t.kinds().size() == 13);
}
