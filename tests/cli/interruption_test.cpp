// The tool killed at random moments while it works: its output is the old file or the whole new one, never a part, and
// an interrupted eval that is started again says what it would have said. KVEVICT_INTERRUPTIONS: how many kills each.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "common/random_cache.hpp"
#include "common/synthetic_dump.hpp"
#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using namespace kvevict::testing;
using Clock = std::chrono::steady_clock;

namespace {

int interruptions() {
  const char* text = std::getenv("KVEVICT_INTERRUPTIONS");
  return text ? std::atoi(text) : 10;
}

// The program, not the library: what is killed must be a process of its own.
pid_t start(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), KVEVICT_TOOL);
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  REQUIRE(::posix_spawn(&child, KVEVICT_TOOL, &actions, nullptr, argv.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  return child;
}

// Waits for the end. True where it ended by itself and well.
bool ended_well(pid_t child) {
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

double seconds_of(const std::vector<std::string>& arguments) {
  const auto begin = Clock::now();
  REQUIRE(ended_well(start(arguments)));
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Starts the tool and kills it after a part of `seconds`. True where it was done before.
bool killed_within(double seconds, const std::vector<std::string>& arguments, Random& random) {
  const pid_t child = start(arguments);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds * static_cast<double>(random.uniform())));
  ::kill(child, SIGKILL);
  return ended_well(child);
}

// `write` replaces the file `out` of `old` content by one that depends on its arguments alone.
void check_whole(const std::filesystem::path& out, const std::vector<std::string>& write, std::uint64_t seed) {
  const std::string old = read_bytes(out);
  const double seconds = seconds_of(write);
  const std::string fresh = read_bytes(out);
  REQUIRE(fresh != old);
  Random random(seed);
  for (int i = 0; i < interruptions(); ++i) {
    write_bytes(out, old);
    const bool done = killed_within(1.2 * seconds, write, random);
    const std::string found = read_bytes(out);
    INFO("interruption ", i, ": ", found.size(), " bytes, the old file has ", old.size(), ", the new one ",
         fresh.size());
    CHECK((found == fresh || (!done && found == old)));
  }
}

}  // namespace

TEST_CASE("a plan that is interrupted leaves the old file or the new one") {
  const TempDir dir;
  SyntheticDump{.shape = {4, 4, 4, 8, 8}, .prompt_len = 3000, .extras = false}.write<float>(dir / "dump");
  const std::string out = (dir / "plan").string(), dump = (dir / "dump").string();
  const auto plan = [&](const char* policy) {
    return std::vector<std::string>{"plan", dump,    "--policy", policy,      "--retain",
                                    "0.8",  "--out", out,        "--threads", "1"};
  };
  REQUIRE(ended_well(start(plan("keydiff"))));
  check_whole(out, plan("knorm"), 1);
}

TEST_CASE("a recording that is interrupted leaves the old file or the new one") {
  const TempDir dir;
  std::filesystem::create_directory(dir / "model");
  TinyModel{}.fill().write(dir / "model");
  std::string tokens;
  for (int i = 0; i < 300; ++i) tokens += std::to_string(i * i % 50) + ' ';
  write_bytes(dir / "tokens.txt", tokens);
  const std::string out = (dir / "dump").string();
  write_bytes(out, "what stood here before");
  check_whole(out,
              {"record", "--model", (dir / "model").string(), "--tokens", (dir / "tokens.txt").string(), "--prompt-len",
               "280", "--dtype", "f32", "--out", out, "--threads", "1"},
              2);
}

TEST_CASE("an eval that is interrupted again and again ends with the result of one that was not") {
  const TempDir dir;
  std::filesystem::create_directory(dir / "model");
  TinyModel{}.fill().write(dir / "model");
  TaskFile tasks;
  for (index_t c = 0; c < 8; ++c) {
    std::vector<index_t> tokens, next;
    for (index_t i = 0; i < 120; ++i) tokens.push_back((i * i + 7 * c) % 50);
    for (index_t i = 0; i < 12; ++i) next.push_back((3 * i + c) % 50);
    tasks.context(tokens, next).probe(c, {1, 2}, {3});
  }
  tasks.write(dir / "tasks.safetensors");
  const auto eval = [&](const std::string& name) {
    return std::vector<std::string>{"eval",
                                    "--model",
                                    (dir / "model").string(),
                                    "--tasks",
                                    (dir / "tasks.safetensors").string(),
                                    "--policy",
                                    "knorm,snapkv",
                                    "--retain",
                                    "0.3,0.6",
                                    "--format",
                                    "json",
                                    "--threads",
                                    "1",
                                    "--out",
                                    (dir / name).string()};
  };
  const auto rows = [&](const std::string& name) {
    auto out = nlohmann::json::parse(read_bytes(dir / name))["rows"];
    for (auto& row : out) row.erase("seconds");
    return out;
  };
  const double seconds = seconds_of(eval("whole.json"));
  const auto whole = rows("whole.json");
  Random random(3);
  for (int i = 0; i < interruptions();) {
    const std::string name = "broken" + std::to_string(i) + ".json";
    bool done = false;
    for (int kills = 0; kills < 6 && !done; ++kills, ++i) done = killed_within(seconds, eval(name), random);
    if (!done) REQUIRE(ended_well(start(eval(name))));
    INFO("before interruption ", i);
    CHECK(rows(name) == whole);
  }
}
