// KeyDiff (arXiv 2504.15364): rows whose key is unlike the others stay. docs/policies/keydiff.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/keydiff.hpp"

namespace kvevict::inline KVEVICT_ABI {

using KeyDiff = Policy<allocate::Uniform, score::KeyDiff>;

}  // namespace kvevict::inline KVEVICT_ABI
