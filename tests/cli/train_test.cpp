// kvevict train lkv on a tiny model: what it writes, what it says, what it refuses.
#include <doctest/doctest.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "cli/tool.hpp"
#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::TaskFile;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;

namespace {

struct Run {
  int status;
  std::string out, err;
};

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
    std::ostringstream out, err;
    static const Registry registry = tool::standard_parts();
    const int status = tool::run(std::move(arguments), registry, out, err);
    return {status, out.str(), err.str()};
  }

 private:
  TempDir dir_;
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

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
