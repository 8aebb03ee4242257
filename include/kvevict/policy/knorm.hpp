// Knorm (arXiv 2406.11430): rows with a small key norm stay. docs/policies/knorm.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/knorm.hpp"

namespace kvevict::inline KVEVICT_ABI {

using KNorm = Policy<allocate::Uniform, score::KNorm>;

}  // namespace kvevict::inline KVEVICT_ABI
