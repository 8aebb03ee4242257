// Ada-KV (arXiv 2407.11550): the heads of a layer share its rows by the scores they hold. docs/policies/adakv.md.
#pragma once
#include "kvevict/allocate/ada.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/window_attention.hpp"

namespace kvevict {

// Floor 0.2, exact layer totals, tokens ranked as in SnapKV.
using AdaKV = Policy<Ada<>, WindowAttention>;

}  // namespace kvevict
