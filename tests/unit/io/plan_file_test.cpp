#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/raw_safetensors.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/plan_file.hpp"
#include "kvevict/io/scores_file.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

// 2 layers of 2 heads; one head keeps nothing; row 3 of layer 1, head 0 is folded into row 4.
EvictionPlan example() {
  EvictionPlan p;
  p.layers = p.heads = 2;
  p.offsets = {0, 3, 3, 5, 6};
  p.indices = {0, 2, 7, 1, 4, 9};
  p.merge_offsets = {0, 0, 0, 1, 1};
  p.merges = {{0, 3, 4, 0.25f}};
  p.specification = "uniform/snapkv(window=32)";
  p.asked = "retain 0.15";
  p.granted = {6, 40, 0.15};
  p.audit.add("window of 32 cut to 2 rows");
  p.audit.add("second \"entry\"");
  return p;
}

template <class F>
std::string refusal(F&& damage) {
  static const RawSafetensors valid = [] {  // once: a written file waits for the disk
    TempDir folder;
    write_plan(folder / "plan", example());
    return RawSafetensors(folder / "plan");
  }();
  TempDir dir;
  RawSafetensors raw = valid;
  damage(raw);
  raw.save(dir / "broken");
  const auto message = message_of<format_error>([&] { (void)read_plan(dir / "broken"); });
  CHECK(has(message, (dir / "broken").string()));
  return message;
}
template <class T>
std::string refusal_of(const char* name, std::size_t i, T value) {
  return refusal([&](RawSafetensors& f) { f.elements<T>(name)[i] = value; });
}

}  // namespace

TEST_CASE("a plan is read as it was written, with its audit and its merges") {
  TempDir dir;
  const EvictionPlan want = example();
  write_plan(dir / "plan", want, "some dump");
  const EvictionPlan got = read_plan(dir / "plan");
  CHECK(same_rows(got, want));
  CHECK(got.merge_offsets == want.merge_offsets);
  REQUIRE(got.merges.size() == 1);
  CHECK(got.merges[0].head == 0);
  CHECK(got.merges[0].from == 3);
  CHECK(got.merges[0].into == 4);
  CHECK(got.merges[0].weight == 0.25f);
  CHECK(got.specification == want.specification);
  CHECK(got.asked == want.asked);
  CHECK(got.granted.total == 6);
  CHECK(got.granted.full == 40);
  CHECK(got.granted.retain == 0.15);
  CHECK(got.audit.entries() == want.audit.entries());
  CHECK(RawSafetensors(dir / "plan").metadata()["dump"] == "some dump");
}

TEST_CASE("a plan without merges and asked in rows stays so") {
  TempDir dir;
  EvictionPlan plan = example();
  plan.merge_offsets.clear();
  plan.merges.clear();
  plan.granted.retain = 0;
  write_plan(dir / "plan", plan);
  const EvictionPlan got = read_plan(dir / "plan");
  CHECK(got.merge_offsets.empty());
  CHECK_FALSE(got.granted.is_ratio());
}

TEST_CASE("a plan whose rows are not ascending, unique and from 0 on is refused") {
  CHECK(has(refusal_of<index_t>("indices", 0, -1), "tensor 'indices': layer 0 head 0: row -1"));
  CHECK(has(refusal_of<index_t>("indices", 1, 0), "layer 0 head 0: row 0 after 0"));
  CHECK(has(refusal_of<index_t>("indices", 4, 1), "layer 1 head 0: row 1 after 1"));
  CHECK(has(refusal_of<std::int64_t>("offsets", 0, 1), "tensor 'offsets': entry 0 is 1; 0 is required"));
  CHECK(has(refusal_of<std::int64_t>("offsets", 2, 2), "tensor 'offsets': entry 2 is 2, below"));
  CHECK(has(refusal_of<std::int64_t>("offsets", 4, 7), "tensor 'offsets': the last entry is 7; 6"));
  CHECK(has(refusal_of<std::int64_t>("offsets", 3, std::int64_t{1} << 62), "tensor 'offsets': entry 4 is 6, below"));
}

TEST_CASE("a plan whose merges name the wrong rows is refused") {
  CHECK(has(refusal_of<index_t>("merge_from", 0, 4), "tensor 'merge_from': entry 0, layer 1 head 0: row 4 is not an"));
  CHECK(has(refusal_of<index_t>("merge_from", 0, -3), "row -3 is not an evicted row"));
  CHECK(has(refusal_of<index_t>("merge_into", 0, 5),
            "tensor 'merge_into': entry 0, layer 1 head 0: row 5 is not a kept"));
  CHECK(has(refusal_of("merge_weight", 0, std::numeric_limits<float>::quiet_NaN()), "tensor 'merge_weight': entry 0"));
  for (const char* name : {"merge_offsets", "merge_from", "merge_into", "merge_weight"})
    CHECK(has(refusal([&](RawSafetensors& f) { f.remove(name); }), std::string("tensor '") + name + "' is missing"));
}

TEST_CASE("a plan file with missing or unknown parts is refused") {
  for (const char* key : {"format", "version", "n_layers", "n_kv_heads", "spec", "budget", "audit"})
    CHECK(has(refusal([&](RawSafetensors& f) { f.metadata().erase(key); }),
              std::string("metadata '") + key + "': is missing"));
  CHECK(has(refusal([](RawSafetensors& f) { f.metadata()["n_layers"] = "3"; }), "shape is [5]; [7] is required"));
  CHECK(has(refusal([](RawSafetensors& f) { f.remove("indices"); }), "tensor 'indices' is missing"));
  CHECK(has(refusal([](RawSafetensors& f) { f.append("more", "U8", {1}, 1); }), "tensor 'more': is unknown"));
  const auto audit = [](const char* json) { return refusal([&](RawSafetensors& f) { f.metadata()["audit"] = json; }); };
  CHECK(has(audit("["), "metadata 'audit': is not valid JSON"));
  CHECK(has(audit("[]"), "metadata 'audit'"));
  CHECK(has(audit(R"({"granted_rows":-1,"rows_full":1,"entries":[]})"), "field 'granted_rows'"));
  CHECK(has(audit(R"({"granted_rows":1,"rows_full":18446744073709551615,"entries":[]})"), "field 'rows_full'"));
  CHECK(has(audit(R"({"granted_rows":1,"rows_full":1,"entries":[1]})"), "field 'entries'"));
  CHECK(has(audit(R"({"granted_rows":1,"rows_full":1})"), "field 'entries'"));
  CHECK(has(audit(R"({"granted_rows":1,"granted_rows":1})"), "stands twice"));
}

TEST_CASE("a plan is checked against the cache it is meant for") {
  const EvictionPlan plan = example();
  const CacheShape shape{2, 2, 2, 4, 4};
  const std::vector<index_t> tokens{8, 1, 5, 10};
  CHECK_NOTHROW(check_plan(plan, shape, tokens));
  const auto refused = [&](CacheShape s, std::vector<index_t> t) {
    return message_of<std::invalid_argument>([&] { check_plan(plan, s, t); });
  };
  CHECK(has(refused({2, 3, 3, 4, 4}, tokens), "2 layers of 2 heads; the cache has 2 of 3"));
  CHECK(has(refused(shape, {7, 1, 5, 10}), "layer 0 head 0: row 7; the cache has 7 rows"));
  CHECK(has(refused(shape, {8, 1, 5, 9}), "layer 1 head 1: row 9"));
  CHECK(has(refused(shape, {8, 1, 5}), "3 token counts for 4 heads"));
}

TEST_CASE("scores are read as they were written") {
  TempDir dir;
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> a{1, 2, -inf, 9, 4, 5, -inf, 9}, b{0, 1, 2, 3, 4, 5};
  ScoresWriter writer("snapkv(window=1)", "some dump");
  writer.add({a.data(), 2, 3, 4});  // a matrix with a stride
  writer.add({b.data(), 2, 3, 3});
  writer.write(dir / "scores");
  const ScoresFile file(dir / "scores");
  CHECK(file.layers() == 2);
  CHECK(file.spec() == "snapkv(window=1)");
  CHECK(file.layer(0).rows == 2);
  CHECK(file.layer(0).cols == 3);
  CHECK(file.layer(0).at(0, 2) == -inf);
  CHECK(file.layer(0).at(1, 0) == 4);
  CHECK(file.layer(1).at(1, 2) == 5);
  CHECK(has(message_of<std::invalid_argument>([&] { writer.add({b.data(), 1, 3, 3}); }), "layer 2 is [1, 3]"));
}

TEST_CASE("a broken scores file is refused") {
  TempDir dir;
  const std::vector<float> a{1, 2, 3, 4, 5, 6};
  ScoresWriter writer("knorm");
  writer.add({a.data(), 2, 3, 3});
  writer.add({a.data(), 2, 3, 3});
  writer.write(dir / "scores");
  const auto refused = [&](auto damage) {
    RawSafetensors raw(dir / "scores");
    damage(raw);
    raw.save(dir / "broken");
    return message_of<format_error>([&] { ScoresFile f(dir / "broken"); });
  };
  CHECK(has(refused([](auto& f) { f.template elements<float>("layers.1.scores")[4] = std::nanf(""); }),
            "tensor 'layers.1.scores': row 1 column 1 is NaN"));
  CHECK(has(refused([](auto& f) { f.remove("layers.1.scores"); }), "tensor 'layers.1.scores' is missing"));
  CHECK(has(refused([](auto& f) { f.header["layers.1.scores"]["shape"] = {3, 2}; }), "shape is [3, 2]; [2, 3]"));
  CHECK(has(refused([](auto& f) { f.header["layers.0.scores"]["dtype"] = "I32"; }), "dtype is I32; F32"));
  CHECK(has(refused([](auto& f) { f.metadata()["n_layers"] = "1"; }), "tensor 'layers.1.scores': is unknown"));
  CHECK(has(refused([](auto& f) { f.metadata()["format"] = "kvevict-plan"; }), "metadata 'format'"));
  CHECK(has(refused([](auto& f) {
              f.remove("layers.0.scores");
              f.append("layers.0.scores", "F32", {0, 3}, 0);
            }),
            "sizes from 1 on"));
}
