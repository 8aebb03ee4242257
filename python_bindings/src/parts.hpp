// The library's erased parts. Their definitions, with the registry and the planner for every element type, are compiled
// in parts.cpp alone; the other units see no scorer and no kernel.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "kvevict/core/exec.hpp"
#include "kvevict/naming/registry.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/plan/plan.hpp"

namespace kvevict::inline KVEVICT_ABI::python {

using AnyPlanner = LayerPlanner<host_exec, AnyAllocator, AnyScorer, TopK>;

// Where checkpoints named shipped:... lie, after $KVEVICT_DATA. To be said before the first call of registry().
void set_data_folder(std::filesystem::path folder);
const Registry& registry();
const char* simd_path();  // of the kernels: "portable", or Highway's name of the target

AnyPlanner make_planner(const AnyPolicy& policy, const CacheShape& shape, std::span<const index_t> tokens,
                        const Budget& budget, const PlanOptions& options);

// Gives the planner its next layer, by layer() or observe(), whichever the policy takes. What layer() answered, or an
// empty plan.
template <CacheElement T>
LayerPlan give_layer(AnyPlanner& planner, const host_exec& exec, const LayerObservation<T>& o);
LayerPlan give_scores(AnyPlanner& planner, const host_exec& exec, Matrix<const float> scores);
EvictionPlan finish(AnyPlanner& planner, const host_exec& exec);

}  // namespace kvevict::inline KVEVICT_ABI::python
