// LKV (arXiv 2605.06676): head budgets and token scores, both learned end to end through a frozen model. Needs a
// checkpoint, Eigen and nlohmann-json. docs/policies/lkv.md.
#pragma once
#include <string>

#include "kvevict/cpu/token_network.hpp"
#include "kvevict/lkv/lkv_h.hpp"
#include "kvevict/lkv/lkv_t.hpp"
#include "kvevict/policy/policy.hpp"

namespace kvevict::inline KVEVICT_ABI {

using LKV = Policy<allocate::LkvH, score::LkvT>;

// Both halves from one checkpoint, which is read once, at first use.
inline LKV lkv_from(const std::string& checkpoint) {
  const LkvFile file(checkpoint);
  return {allocate::LkvH{.file = file}, score::LkvT{.file = file}, {}};
}

}  // namespace kvevict::inline KVEVICT_ABI
