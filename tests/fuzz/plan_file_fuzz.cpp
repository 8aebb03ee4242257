// Plans: what passes is what a plan promises, and a cache of the right size would take it.
#include "kvevict/io/plan_file.hpp"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

std::vector<std::string> seeds() {
  const testing::TempDir folder;
  EvictionPlan plan;
  plan.layers = 2;
  plan.heads = 2;
  plan.offsets = {0, 2, 5, 5, 6};
  plan.indices = {0, 3, 1, 2, 7, 4};
  plan.specification = "uniform/knorm";
  plan.asked = "retain 0.5";
  plan.granted = {6, 12, 0.5};
  plan.audit.add("something was cut");
  write_plan(folder / "plain", plan, "a dump");
  plan.merge_offsets = {0, 1, 1, 1, 2};
  plan.merges = {{0, 1, 3, 0.25f}, {1, 5, 4, 1.f}};
  write_plan(folder / "merges", plan);
  return {testing::read_bytes(folder / "plain"), testing::read_bytes(folder / "merges")};
}

void run(std::string_view input) {
  const InputFile file(input);
  const EvictionPlan plan = read_plan(file.path());
  std::vector<index_t> tokens;
  for (index_t l = 0; l < plan.layers; ++l) {
    for (index_t h = 0; h < plan.heads; ++h) {
      const auto kept = plan.head(l, h);
      for (std::size_t i = 0; i < kept.size(); ++i)
        if (kept[i] < 0 || (i > 0 && kept[i] <= kept[i - 1])) std::abort();
      tokens.push_back(kept.empty() ? 0 : kept.back());
      if (!kept.empty() && kept.back() < 2147483647) ++tokens.back();
    }
    for (const RowMerge& m : plan.layer(l).merges) use(m.weight + static_cast<float>(m.from + m.into));
  }
  check_plan(plan, {plan.layers, plan.heads, plan.heads, 1, 1}, tokens);
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate_safetensors};
  return t;
}

}  // namespace kvevict::fuzz
