// KeyDiff (arXiv 2504.15364): rows whose key is unlike the others stay. docs/policies/keydiff.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/key_diff.hpp"

namespace kvevict {

using KeyDiffPolicy = Policy<Uniform, KeyDiff>;

}  // namespace kvevict
