// kvevict train lkv on a tiny model: what it writes, what it says, what it refuses.
#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cli/run_tool.hpp"
#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/file_lock.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::contains;
using kvevict::testing::run_tool;
using kvevict::testing::TaskFile;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;
using Run = kvevict::testing::ToolResult;

namespace {

class Room {
 public:
  Room() {
    std::filesystem::create_directories(dir_ / "tiny");
    TinyModel().fill().write(dir_ / "tiny");
    TaskFile file;
    for (index_t c = 0; c < 5; ++c) {
      file.context({1, 2, 3, 4, 5, 6, 7, 8, 9, c, 10, 11}, {12, 13, 14});
      file.probe(c, {15, 16}, {17});
    }
    file.write(dir_ / "train.safetensors");
  }
  std::string operator/(const char* name) const { return (dir_ / name).string(); }
  Run train(std::vector<std::string> more) const { return train_to(*this / "lkv.safetensors", std::move(more)); }
  Run train_to(const std::string& file, std::vector<std::string> more) const {
    std::vector<std::string> arguments = {
        "train", "lkv",       "--model", *this / "tiny",   "--tasks", *this / "train.safetensors", "--out",
        file,    "--threads", "1",       "--token-hidden", "3"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_tool(arguments);
  }

 private:
  TempDir dir_;
};

}  // namespace

TEST_CASE("train lkv writes a checkpoint that says how it was made, and reports what matters") {
  const Room room;
  const Run r = room.train({"--steps", "3", "--report", "1", "--check", "3", "--seed", "5"});
  REQUIRE_MESSAGE(r.status == 0, r.err);
  for (const char* part :
       {"step 3/3", "KL ", "hidden ", "score std ", "ratios ", "empty heads ", "s left", "hard loss"})
    CHECK(contains(r.err, part));
  CHECK_FALSE(contains(r.err, "nan"));
  const LkvCheckpoint c(room / "lkv.safetensors");
  CHECK(c.sizes().layers == 3);
  CHECK(c.sizes().token_hidden == 3);
  CHECK(c.metadata().at("model") == "tiny");
  CHECK(contains(c.metadata().at("recipe"), "seed=5"));
  CHECK_FALSE(std::filesystem::exists(room / "lkv.safetensors.state"));
}

TEST_CASE("train lkv says at once that it cannot write") {
  const Room room;
  for (const std::string& out : {room / "absent/lkv.safetensors", room / "", std::string()}) {
    const Run r = room.train_to(out, {"--steps", "2"});
    CHECK(r.status == 1);
    CHECK_FALSE(contains(r.err, "step 1/"));
    CHECK(contains(r.err, out));
  }
}

TEST_CASE("flags of train lkv win over its config file, and the config over the defaults") {
  const Room room;
  testing::write_bytes(room / "recipe.json", R"({"steps": 2, "noise": false, "key_frame": "post-rope", "lr": 0.01})");
  const Run r = room.train({"--config", room / "recipe.json", "--steps", "1", "--quiet"});
  REQUIRE_MESSAGE(r.status == 0, r.err);
  CHECK(r.err.empty());
  const auto recipe = LkvCheckpoint(room / "lkv.safetensors").metadata().at("recipe");
  for (const char* part : {"steps=1,", "noise=false,", "key_frame=post-rope,", "lr=0.01,", "batch=4,"})
    CHECK(contains(recipe, part));
}

TEST_CASE("train lkv refuses what cannot be meant, and names it") {
  const Room room;
  testing::write_bytes(room / "recipe.json", R"({"learning_rate": 1})");
  CHECK(contains(room.train({"--config", room / "recipe.json"}).err, "field `learning_rate`"));
  const Run bad = room.train({"--tau-end", "2"});
  CHECK(bad.status == 2);
  CHECK(contains(bad.err, "tau_end <= tau"));
  CHECK(room.train({"--threshold", "tanh"}).status == 2);
  CHECK(room.train({"--model", "/nowhere"}).status != 0);
  CHECK_FALSE(std::filesystem::exists(room / "lkv.safetensors"));
}

TEST_CASE("a teacher that was cut short is made again, with a note") {
  const Room room;
  const std::string cache = room / "cache";
  REQUIRE(room.train({"--steps", "1", "--cache", cache}).status == 0);
  const std::string first = testing::read_bytes(room / "lkv.safetensors");
  int cut = 0;
  for (const auto& file : std::filesystem::directory_iterator(cache)) {
    std::filesystem::resize_file(file.path(), std::filesystem::file_size(file.path()) / 2);
    ++cut;
  }
  REQUIRE(cut > 0);
  const Run again = room.train({"--steps", "1", "--cache", cache});
  REQUIRE_MESSAGE(again.status == 0, again.err);
  CHECK(contains(again.err, "kvevict: note: " + cache));
  CHECK(contains(again.err, "it is made again"));
  CHECK(testing::read_bytes(room / "lkv.safetensors") == first);
  CHECK_FALSE(contains(room.train({"--steps", "1", "--cache", cache}).err, "note"));
}

TEST_CASE("two trainings do not write one checkpoint, and none writes over what it reads") {
  const Room room;
  {
    const FileLock other(room / "lkv.safetensors");
    const Run r = room.train({"--steps", "1"});
    CHECK(r.status == 1);
    CHECK(contains(r.err, "another process is writing it"));
  }
  const Run tasks = room.train_to(room / "train.safetensors", {"--steps", "1"});
  CHECK(tasks.status == 2);
  CHECK(contains(tasks.err, "is a file that this command reads"));
  CHECK(room.train_to(room / "tiny/model.safetensors", {"--steps", "1"}).status == 2);
  CHECK(room.train({"--steps", "1", "--model-name", "\xff"}).status == 2);
}
