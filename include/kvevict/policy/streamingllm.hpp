// StreamingLLM (arXiv 2309.17453): the first rows and the newest. docs/policies/streamingllm.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/position.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Four sinks, the rest of the budget to the newest rows.
using StreamingLLM = Policy<allocate::Uniform, score::Position>;

}  // namespace kvevict::inline KVEVICT_ABI
