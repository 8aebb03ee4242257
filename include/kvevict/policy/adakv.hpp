// Ada-KV (arXiv 2407.11550): the heads of a layer share its rows by the scores they hold. docs/policies/adakv.md.
#pragma once
#include "kvevict/allocate/ada.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Floor 0.2, exact layer totals, tokens ranked as in SnapKV.
using AdaKV = Policy<allocate::Ada<>, score::SnapKV>;

}  // namespace kvevict::inline KVEVICT_ABI
