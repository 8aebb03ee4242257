// Expected Attention (arXiv 2510.00636): rows that future queries are expected to look at. docs/policies/expected.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/expected_attention.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/expected.hpp"

namespace kvevict::inline KVEVICT_ABI {

using ExpectedAttention = Policy<allocate::Uniform, score::Expected>;

}  // namespace kvevict::inline KVEVICT_ABI
