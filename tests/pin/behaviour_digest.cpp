// Prints one line per case of a grid of policies, caches, element types, budgets and threads: digests of the scores'
// bits, of the rows per head and of the kept rows. Two commits that behave the same print the same lines
// (compare_commits.sh). A smaller grid, folded into fewer lines, is recorded and checked as a test:
//
//   behaviour_digest DATA                  the grid; DATA is the folder of the shipped recording and checkpoints
//   behaviour_digest DATA --check FOLDER   the smaller grid against FOLDER/rows.txt and FOLDER/scores-*.txt
//   behaviour_digest DATA --record FOLDER  writes them
//
// Kept rows of the portable path do not depend on the machine. Scores do: on the compiler, its flags and the C library.
// So a file of scores names those, and is compared only where they are the same.
#if defined(__GLIBC__) || __has_include(<gnu/libc-version.h>)
#include <gnu/libc-version.h>
#define KVEVICT_PIN_LIBC gnu_get_libc_version()
#else
#define KVEVICT_PIN_LIBC "unknown"
#endif

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pin/api.hpp"
#include "pin/cases.hpp"
#include "pin/digest.hpp"
#include "pin/worlds.hpp"

#if !defined(KVEVICT_PIN_FLAGS)
#define KVEVICT_PIN_FLAGS "unknown"
#endif

namespace pin {
namespace {

// Scores of all layers. A row of scores belongs to a KV head, or to a query head; columns behind the head's tokens must
// stay as they were.
template <class P, class T>
std::string score_outcome(const P& policy, const World<T>& world, int threads) {
  return outcome([&] {
    constexpr float untouched = -77.f;
    Digest digest;
    bool clean = true;
    const index_t rows = api::score_rows(policy, world.shape);
    for (const auto& o : world.observations) {
      const index_t width = o.most_tokens();
      std::vector<float> scores(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width), untouched);
      const Matrix<float> out{scores.data(), rows, width, width};
      api::score(policy, threads, o, out);
      for (index_t r = 0; r < rows; ++r) {
        const index_t tokens = o.tokens(r / (rows / world.shape.kv_heads));
        digest.add_all(std::span<const float>(out.row(r), static_cast<std::size_t>(tokens)));
        for (index_t c = tokens; c < width; ++c) clean = clean && out.at(r, c) == untouched;
      }
    }
    return "scores=" + digest.text() + (clean ? "" : " beyond=written");
  });
}

struct Grid {
  api::Registry registry;
  std::string data;
  bool folded;
  Report scores, plans;

  Grid(std::string folder, bool fold)
      : registry(api::registry(folder + "/lkv-smollm2.safetensors", folder + "/lkv-paper-smollm2.safetensors")),
        data(std::move(folder)),
        folded(fold),
        scores(fold),
        plans(fold) {}

  std::string named(std::string text) const {
    for (const auto& [word, file] : {std::pair{"=LKV", "/lkv-smollm2"}, std::pair{"=PAPER", "/lkv-paper-smollm2"}})
      if (const auto at = text.find(word); at != std::string::npos)
        text.replace(at + 1, std::strlen(word) - 1, '"' + data + file + ".safetensors\"");
    return text;
  }
  // Threads do not change results, so equal ones share a line.
  template <class F>
  void over_threads(Report& report, const std::string& group, std::string detail, const std::vector<int>& threads,
                    F&& result) {
    if (!detail.empty()) detail += ' ';
    std::vector<std::pair<std::string, std::string>> seen;  // threads, result
    for (const int n : threads) {
      const std::string text = result(n);
      if (!seen.empty() && seen.back().second == text) seen.back().first += ',' + std::to_string(n);
      else seen.emplace_back(std::to_string(n), text);
    }
    for (const auto& [names, text] : seen) report.line(group, detail + "threads=" + names, text);
  }

  template <class P, class T>
  void plan_case(const std::string& name, const P& policy, const World<T>& world, const NamedBudget& budget,
                 const std::vector<int>& threads) {
    const std::string detail = std::string(kvevict::element_name<T>()) + ' ' + budget.name;
    const std::span<const LayerObservation<T>> observations(world.observations);
    over_threads(plans, "plan " + world.name + ' ' + name, detail, threads, [&](int n) {
      return outcome([&] { return describe(api::plan(policy, n, View<T>{&world}, observations, budget.budget)); });
    });
    const std::string group = (folded ? "plan " : "layers ") + world.name + ' ' + name;
    over_threads(plans, group, detail, {threads.back()}, [&](int n) {
      return outcome([&] {
        return describe(
            api::plan_by_layer(policy, n, world.shape, world.tokens(), world.row_bytes(), observations, budget.budget));
      });
    });
  }

  template <class T>
  void score_case(const std::string& text, const World<T>& world, const std::vector<int>& threads) {
    over_threads(scores, "score " + world.name + ' ' + text, kvevict::element_name<T>(), threads, [&](int n) {
      return outcome([&] { return score_outcome(registry.policy(named("uniform/" + text)), world, n); });
    });
  }

  // A policy by its text.
  template <class T>
  void text_case(const std::string& text, const World<T>& world, const std::vector<NamedBudget>& asked,
                 const std::vector<int>& threads) {
    std::unique_ptr<api::AnyPolicy> policy;
    const std::string fault = outcome([&] {
      policy = std::make_unique<api::AnyPolicy>(registry.policy(named(text)));
      return std::string();
    });
    if (!policy) plans.line("text " + world.name + ' ' + text, kvevict::element_name<T>(), fault);
    else
      for (const auto& budget : asked) plan_case(text, *policy, world, budget, threads);
  }

  template <class T>
  void world_cases(const World<T>& world) {
    const std::vector<int> threads = folded ? std::vector<int>{2} : std::vector<int>{1, 2, 7};
    std::int64_t rows = 0;
    for (const index_t t : world.tokens()) rows += t;
    const auto asked = budgets(world.row_bytes(), rows);
    for (const auto& s : scorers()) {
      score_case(s, world, threads);
      text_case("uniform/" + s, world, asked, threads);
    }
    for (const auto& p : presets()) text_case(p, world, asked, threads);
    const auto partners = folded ? std::vector<std::string>{"knorm", "snapkv(window=8)"} : scorers_of_allocators();
    for (const auto& a : allocators())
      for (const auto& s : partners) text_case(a + '/' + s, world, asked, threads);
    for (const auto& p : {"global/oracle(sinks=2)", "ada/oracle", "ada/expected(sinks=2)", "global/expected"})
      text_case(p, world, asked, threads);
    if (world.name == "ragged") {
      for (const auto& s : faulty_scorers()) {
        score_case(s, world, {2});
        text_case("uniform/" + s, world, asked, {2});
      }
      for (const auto& a : faulty_allocators()) text_case(a + "/knorm", world, asked, {2});
      for (const auto& p : learned_presets()) text_case(p, world, asked, {2});  // of another shape
    }
    // Erased parts run the same code for every type, so one type is enough for what compiles slowly.
    if constexpr (std::is_same_v<T, fp16_t>)
      api::typed_policies([&](const std::string& name, const auto& policy) {
        for (const auto& budget : asked) plan_case("typed:" + name, policy, world, budget, threads);
      });
  }

  // The recording is large: one budget with every number of threads, two with one.
  template <class T>
  void recording_cases(const World<T>& world) {
    const std::vector<NamedBudget> usual{{"retain=0.15", Budget::retain(0.15)}},
        others{{"retain=0.05", Budget::retain(0.05)}, {"rows=20", Budget::rows(20)}};
    auto names = presets();
    for (const auto& p : learned_presets()) names.push_back(p);
    if (folded) {
      for (const auto& p : names) text_case(p, world, usual, {2});
      for (const auto& s : {"snapkv", "keydiff", "expected", "lkv-t(file=LKV)", "lkv-t(file=PAPER)"})
        score_case(s, world, {2});
      return;
    }
    for (const auto& p : names) {
      text_case(p, world, usual, {1, 2, 7});
      text_case(p, world, others, {2});
    }
    for (const auto& p : {"ada/keydiff", "ada(variant=kvpress)/snapkv(protect=score)", "global(minimum=1)/snapkv",
                          "ada<pyramid>/snapkv", "uniform(exact=true)/expected(sinks=4)"})
      text_case(p, world, usual, {2});
    for (const auto& a : learned_allocators())
      for (const auto& s : {"knorm", "snapkv", "lkv-t(file=PAPER)"}) text_case(a + '/' + s, world, usual, {2});
    for (const auto& a : {"ada", "global", "pyramid"})
      text_case(std::string(a) + "/lkv-t(file=LKV)", world, usual, {2});
    for (const auto& s : scorers()) score_case(s, world, {2});
    for (const auto& s : learned_scorers()) score_case(s, world, {1, 2, 7});
    if constexpr (std::is_same_v<T, fp16_t>)
      api::typed_lkv(data + "/lkv-smollm2.safetensors", [&](const std::string& name, const auto& policy) {
        for (const auto& budget : usual) plan_case("typed:" + name, policy, world, budget, {1, 2});
      });
  }

  void texts() {
    for (const auto& text : faulty_texts())
      plans.line("text \"" + text + '"', "", outcome([&] {
                   (void)registry.policy(text);
                   return std::string("built");
                 }));
    if (folded) return;
    // What a policy says of itself, without the folder of its checkpoint.
    std::vector<std::string> all = presets();
    for (const auto& p : learned_presets()) all.push_back(p);
    for (const auto& s : scorers()) all.push_back("uniform/" + s);
    for (const auto& s : learned_scorers()) all.push_back("uniform/" + s);
    for (const auto& a : allocators()) all.push_back(a + "/knorm");
    for (const auto& a : learned_allocators()) all.push_back(a + "/knorm");
    for (const auto& text : all)
      plans.line("specification " + text, "", outcome([&] {
                   std::string out = registry.policy(named(text)).specification();
                   for (std::size_t at; (at = out.find(data)) != std::string::npos;)
                     out.replace(at, data.size(), "DATA");
                   return out;
                 }));
  }

  void run() {
    texts();
    std::uint64_t seed = 0;
    for (const WorldSpec& spec : world_specs()) {
      ++seed;
      world_cases(*make_world<float>(spec, seed));
      world_cases(*make_world<fp16_t>(spec, seed));
      world_cases(*make_world<bf16_t>(spec, seed));
    }
    const auto recording = api::read_recording(data + "/smollm2-512.safetensors");
    World<fp16_t> shipped("smollm2", recording.layers.front().shape);
    shipped.observations = recording.layers;
    recording_cases(shipped);
    if (!folded) {
      recording_cases(*convert_world<float>("smollm2", recording));
      recording_cases(*convert_world<bf16_t>("smollm2", recording));
    }
    std::vector<index_t> last;
    for (index_t i = 0; i < static_cast<index_t>(shipped.shape.heads_total()); ++i)
      last.push_back(i % 17 == 5 ? 0 : (37 * i * i + 11) % 121);
    if (!folded) recording_cases(*convert_world<float>("smollm2-evicted", recording, last));
    recording_cases(*convert_world<fp16_t>("smollm2-evicted", recording, last));
    if (!folded) recording_cases(*convert_world<bf16_t>("smollm2-evicted", recording, last));
  }
};

// What scores depend on beside the code.
std::string build() {
  std::string out = __VERSION__;
#if defined(__clang__)
  out = "clang " + out;
#else
  out = "gcc " + out;
#endif
#if defined(__x86_64__)
  out += ", x86-64";
#elif defined(__aarch64__)
  out += ", aarch64";
#else
  out += ", another processor";
#endif
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  out += " with fma";
#endif
#if defined(__AVX__)
  out += " with avx";
#endif
#if defined(__FAST_MATH__)
  out += " with fast math";
#endif
  return out + ", " KVEVICT_PIN_FLAGS ", libc " + KVEVICT_PIN_LIBC + ", " + kvevict::simd_target();
}

using Lines = std::map<std::string, std::string>;

// "name : digest" lines; the first line is a comment.
Lines read(const std::filesystem::path& path, std::string& comment) {
  std::ifstream in(path);
  Lines out;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("# ")) {
      comment = line.substr(2);
      continue;
    }
    const auto at = line.rfind(" : ");
    if (at != std::string::npos) out[line.substr(0, at)] = line.substr(at + 3);
  }
  return out;
}

void write(const std::filesystem::path& path, const std::string& comment, const Lines& lines) {
  std::ofstream out(path);
  out << "# " << comment << '\n';
  for (const auto& [name, digest] : lines) out << name << " : " << digest << '\n';
}

int compare(const std::string& what, const Lines& recorded, const Lines& now) {
  int wrong = 0;
  const auto say = [&](const std::string& name, const char* how) {
    if (++wrong <= 20) std::fprintf(stderr, "%s: %s: %s\n", what.c_str(), name.c_str(), how);
  };
  for (const auto& [name, digest] : recorded) {
    const auto found = now.find(name);
    if (found == now.end()) say(name, "is recorded, but there is no such case");
    else if (found->second != digest) say(name, "differs from what is recorded");
  }
  for (const auto& [name, digest] : now)
    if (!recorded.count(name)) say(name, "is not recorded");
  std::printf("%s: %zu recorded, %d differ\n", what.c_str(), recorded.size(), wrong);
  return wrong;
}

int check(const Grid& grid, const std::filesystem::path& folder) {
  std::string comment;
  int wrong = compare("kept rows", read(folder / "rows.txt", comment), grid.plans.folded());
  bool found = false;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.path().filename().string().starts_with("scores-")) continue;
    const Lines recorded = read(entry.path(), comment);
    if (comment != build()) continue;
    found = true;
    wrong += compare("scores (" + comment + ')', recorded, grid.scores.folded());
  }
  if (!found) std::printf("scores: none are recorded for %s\n", build().c_str());
  if (wrong)
    std::fprintf(stderr,
                 "tests/pin/README.md says how to find what changed, and how to record a change that is meant\n");
  return wrong != 0;
}

void record(const Grid& grid, const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  write(folder / "rows.txt", "granted rows, rows per head and kept rows of the portable path", grid.plans.folded());
  Digest name;
  name.add(build());
  std::filesystem::path to = folder / ("scores-" + name.text() + ".txt");
  write(to, build(), grid.scores.folded());
}

int run(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::fputs("usage: behaviour_digest DATA [--check FOLDER | --record FOLDER]\n", stderr);
    return 2;
  }
  Grid grid(argv[1], argc == 4);
  grid.run();
  if (argc == 2) return 0;
  if (std::string_view(argv[2]) == "--check") return check(grid, argv[3]);
  record(grid, argv[3]);
  return 0;
}

}  // namespace
}  // namespace pin

int main(int argc, char** argv) { return pin::run(argc, argv); }
