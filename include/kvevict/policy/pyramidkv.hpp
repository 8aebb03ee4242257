// PyramidKV (arXiv 2406.02069): lower layers keep more rows than upper ones; tokens are ranked as in SnapKV.
// docs/policies/pyramidkv.md.
#pragma once
#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::inline KVEVICT_ABI {

// beta 20, exact sum, window inside the budget.
using PyramidKV = Policy<allocate::Pyramid, score::SnapKV>;

}  // namespace kvevict::inline KVEVICT_ABI
