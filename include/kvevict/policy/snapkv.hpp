// SnapKV (arXiv 2404.14469): the newest queries of the prompt vote for the rows that every head keeps.
// Formula, variants of the published codes and deviations: docs/policies/snapkv.md.
#pragma once
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/policy/policy.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Window 32, rows mean, pool max:7, group mean, half of the budget for the window: the published long-context setting
// with one vote per KV head.
using SnapKV = Policy<allocate::Uniform, score::SnapKV>;

// The arithmetic of NVIDIA kvpress 0.5.5 (SnapKVPress), rounding and window inflation included.
inline SnapKV snapkv_kvpress() {
  SnapKV out;
  out.allocator.rounding = UniformRounding::kvpress;
  out.scorer.window = 64;
  out.scorer.pool = {Pooling::Kind::avg, 5};
  out.scorer.order = PoolOrder::pool_then_group;
  out.scorer.protect = ProtectShare::score;
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
