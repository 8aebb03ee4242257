// Knorm (arXiv 2406.11430): rows with a small key norm stay. docs/policies/knorm.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/key_norm.hpp"

namespace kvevict {

using Knorm = Policy<Uniform, KeyNorm>;

}  // namespace kvevict
