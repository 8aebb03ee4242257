#include "parts.hpp"

#include <utility>

#include "kvevict/cpu/simd.hpp"
#include "kvevict/io/shipped.hpp"
#include "kvevict/naming/standard_parts.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

std::filesystem::path& data_folder() {
  static std::filesystem::path folder;
  return folder;
}

// The shipped checkpoint of this name, or an empty text where it is not there: then no preset is made of it.
std::string shipped(const char* name) {
  const std::vector<std::filesystem::path> folders{data_folder()};
  try {
    const std::string text = std::string(shipped_prefix) + name;
    (void)resolve_shipped(text, folders);
    return text;
  } catch (const format_error&) {
    return "";
  }
}

}  // namespace

void set_data_folder(std::filesystem::path folder) { data_folder() = std::move(folder); }

const Registry& registry() {
  static const Registry all =
      standard_registry({shipped("lkv-smollm2"), shipped("lkv-paper-smollm2"), {data_folder()}});
  return all;
}

const char* simd_path() { return simd_target(); }

AnyPlanner make_planner(const AnyPolicy& policy, const CacheShape& shape, std::span<const index_t> tokens,
                        const Budget& budget, const PlanOptions& options) {
  return policy.make_planner(shape, tokens, budget, options);
}

template <CacheElement T>
LayerPlan give_layer(AnyPlanner& planner, const host_exec& exec, const LayerObservation<T>& o) {
  if (planner.layerwise()) return planner.layer(exec, o);
  planner.observe(exec, o);
  return {};
}
template LayerPlan give_layer(AnyPlanner&, const host_exec&, const LayerObservation<float>&);
template LayerPlan give_layer(AnyPlanner&, const host_exec&, const LayerObservation<fp16_t>&);
template LayerPlan give_layer(AnyPlanner&, const host_exec&, const LayerObservation<bf16_t>&);

LayerPlan give_scores(AnyPlanner& planner, const host_exec& exec, Matrix<const float> scores) {
  if (planner.layerwise()) return planner.layer(exec, scores);
  planner.observe(exec, scores);
  return {};
}

EvictionPlan finish(AnyPlanner& planner, const host_exec& exec) { return planner.finish(exec); }

}  // namespace kvevict::inline KVEVICT_ABI::python
