// LKV (arXiv 2605.06676): head budgets and token scores, both learned end to end through a frozen model. Needs a
// checkpoint, Eigen and nlohmann-json. docs/policies/lkv.md.
#pragma once
#include <string>

#include "kvevict/lkv/lkv_head.hpp"
#include "kvevict/lkv/lkv_token.hpp"
#include "kvevict/policy/policy.hpp"

namespace kvevict {

using LKV = Policy<LkvHead, LkvToken>;

// Both halves from one checkpoint, which is read once, at first use.
inline LKV lkv_from(const std::string& checkpoint) {
  const LkvFile file(checkpoint);
  return {LkvHead{.file = file}, LkvToken{.file = file}, {}};
}

}  // namespace kvevict
