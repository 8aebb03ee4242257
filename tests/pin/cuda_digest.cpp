// The lines of behaviour_digest.cpp for the device's path: the library's own launches and kernels, run on the host as
// fibres (emulated/). One thread order is enough here; that others give the same is what tests/cuda checks.
//
//   cuda_digest DATA
#include <cuda_runtime.h>

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pin/api.hpp"
#include "pin/cases.hpp"
#include "pin/digest.hpp"
#include "pin/worlds.hpp"

namespace pin {
namespace {

// A part with parameters from text: with(part, "window=8,pool=avg:5").
template <class P>
P with(P part, std::string_view text) {
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    const auto equals = pair.find('=');
    bool set = false;
    P::parameters(part, [&](std::string_view key, auto& value) {
      using kvevict::parse_value;
      if (key == pair.substr(0, equals)) set = parse_value(pair.substr(equals + 1), value);
    });
    if (!set) throw std::logic_error("no such parameter: " + std::string(pair));
  }
  return part;
}

template <class T>
using DeviceView = View<T, kvevict::cuda_space>;

struct CudaGrid {
  std::string checkpoint;
  Report report{false};

  template <class S, class T>
  void score_case(const std::string& name, const S& scorer, const World<T>& world) {
    report.line("score " + world.name + ' ' + name, kvevict::element_name<T>(), outcome([&] {
                  constexpr float untouched = -77.f;
                  Digest digest;
                  bool clean = true;
                  const index_t rows = score_heads(scorer, world.shape);
                  for (const auto& o : world.observations) {
                    const index_t width = o.most_tokens();
                    std::vector<float> scores(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width),
                                              untouched);
                    const Matrix<float> out{scores.data(), rows, width, width};
                    api::score_on_device(scorer, o, out);
                    for (index_t r = 0; r < rows; ++r) {
                      const index_t tokens = o.tokens(r / (rows / world.shape.kv_heads));
                      digest.add_all(std::span<const float>(out.row(r), static_cast<std::size_t>(tokens)));
                      for (index_t c = tokens; c < width; ++c) clean = clean && out.at(r, c) == untouched;
                    }
                  }
                  return "scores=" + digest.text() + (clean ? "" : " beyond=written");
                }));
  }

  template <class P, class T>
  void plan_case(const std::string& name, const P& policy, const World<T>& world, const NamedBudget& budget) {
    const std::string detail = std::string(kvevict::element_name<T>()) + ' ' + budget.name;
    const std::span<const LayerObservation<T>> observations(world.observations);
    report.line("plan " + world.name + ' ' + name, detail, outcome([&] {
                  return describe(api::plan_on_device(policy, DeviceView<T>{&world}, observations, budget.budget));
                }));
  }

  // What a device cache holds after the planner's layers were carried out.
  template <class P, class T>
  void compact_case(const std::string& name, const P& policy, const World<T>& world, const NamedBudget& budget) {
    const std::string detail = std::string(kvevict::element_name<T>()) + ' ' + budget.name;
    const std::span<const LayerObservation<T>> observations(world.observations);
    report.line("compact " + world.name + ' ' + name, detail, outcome([&] {
                  const auto cache = api::compact_on_device(policy, View<T>{&world}, world.tokens(), world.row_bytes(),
                                                            observations, budget.budget);
                  Digest digest;
                  std::int64_t kept = 0;
                  for (index_t l = 0; l < world.shape.layers; ++l)
                    for (index_t h = 0; h < world.shape.kv_heads; ++h) {
                      digest.add_all(cache.positions(l, h));
                      kept += cache.tokens(l, h);
                      for (const auto& rows : {cache.keys(l, h), cache.values(l, h)})
                        for (std::int64_t r = 0; r < rows.rows; ++r)
                          for (index_t c = 0; c < rows.cols; ++c) digest.add(kvevict::to_float(rows.at(r, c)));
                    }
                  return "kept=" + std::to_string(kept) + " cache=" + digest.text();
                }));
  }

  template <class T>
  void world_cases(const World<T>& world, bool wide) {
    const auto snapkv = kvevict::SnapKV{}.scorer;
    const auto position = kvevict::StreamingLLM{}.scorer;
    const auto knorm = api::KNorm{}.scorer;
    const auto keydiff = api::KeyDiff{}.scorer;
    for (const char* p : {"", "window=8", "window=1,pool=none", "window=8,rows=sum,group=max",
                          "window=8,group=sum,pool=avg:5", "window=8,pool=max:3,order=pool-then-group",
                          "window=8,pool=avg:9,group=none", "window=8,sinks=2,protect=score", "window=0"})
      score_case("snapkv(" + std::string(p) + ')', with(snapkv, p), world);
    for (const char* p : {"", "sinks=2,protect=score", "sinks=-1"}) {
      score_case("position(" + std::string(p) + ')', with(position, p), world);
      score_case("knorm(" + std::string(p) + ')', with(knorm, p), world);
      score_case("keydiff(" + std::string(p) + ')', with(keydiff, p), world);
    }

    std::int64_t rows = 0;
    for (const index_t t : world.tokens()) rows += t;
    auto asked = budgets(world.row_bytes(), rows);
    if (!wide) asked = {asked[1]};
    const auto each_scorer = [&](const std::string& name, const auto& allocator) {
      using kvevict::Policy;
      for (const auto& budget : asked) {
        plan_case(name + "/knorm", Policy{allocator, knorm}, world, budget);
        if (wide && budget.name != "retain=0.3") continue;
        plan_case(name + "/snapkv(window=8)", Policy{allocator, with(snapkv, "window=8")}, world, budget);
        plan_case(name + "/snapkv(window=8,sinks=2,protect=score)",
                  Policy{allocator, with(snapkv, "window=8,sinks=2,protect=score")}, world, budget);
      }
    };
    const api::allocate::Uniform uniform;
    const api::allocate::Pyramid pyramid;
    const api::allocate::Ada<> ada;
    const api::allocate::Ada<api::allocate::Pyramid> nested;
    for (const char* p : {"", "exact=true", "rounding=kvpress"})
      each_scorer("uniform(" + std::string(p) + ')', with(uniform, p));
    for (const char* p : {"", "beta=4"}) each_scorer("pyramid(" + std::string(p) + ')', with(pyramid, p));
    for (const char* p :
         {"", "floor=0.5", "floor=0", "variant=kvpress", "variant=reference", "normalize=softmax", "normalize=none"})
      each_scorer("ada(" + std::string(p) + ')', with(ada, p));
    each_scorer("ada<pyramid>", nested);
    for (const auto& budget : asked) {
      plan_case("uniform/position(sinks=4)", kvevict::Policy{uniform, with(position, "sinks=4")}, world, budget);
      plan_case("uniform/keydiff(sinks=2,protect=full)",
                kvevict::Policy{uniform, with(keydiff, "sinks=2,protect=full")}, world, budget);
      compact_case("uniform/knorm", kvevict::Policy{uniform, knorm}, world, budget);
      compact_case("ada/knorm", kvevict::Policy{ada, knorm}, world, budget);
    }
  }

  void run(const std::string& data) {
    std::uint64_t seed = 0;
    for (const WorldSpec& spec : world_specs()) {
      ++seed;
      world_cases(*make_world<float>(spec, seed), false);
      world_cases(*make_world<fp16_t>(spec, seed), true);
      world_cases(*make_world<bf16_t>(spec, seed), false);
    }
    // The checkpoints fit the recording alone, and that is long for an emulation: some rows of each head.
    const auto recording = api::read_recording(data + "/smollm2-512.safetensors");
    std::vector<index_t> last;
    for (index_t i = 0; i < static_cast<index_t>(recording.layers.front().shape.heads_total()); ++i)
      last.push_back(i % 17 == 5 ? 0 : (37 * i * i + 11) % 41);
    const auto cases = [&](const auto& world) {
      for (const char* file : {"/lkv-smollm2.safetensors", "/lkv-paper-smollm2.safetensors"})
        api::typed_lkv(data + file, [&](const std::string&, const auto& policy) {
          const std::string name = std::string("lkv-h/lkv-t(file=") + file + ')';
          score_case(name, policy.scorer, world);
          plan_case(name, policy, world, {"retain=0.3", Budget::retain(0.3)});
        });
    };
    cases(*convert_world<float>("smollm2-evicted", recording, last));
    cases(*convert_world<fp16_t>("smollm2-evicted", recording, last));
    cases(*convert_world<bf16_t>("smollm2-evicted", recording, last));
  }
};

}  // namespace
}  // namespace pin

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: cuda_digest DATA\n", stderr);
    return 2;
  }
  pin::CudaGrid{}.run(argv[1]);
}
