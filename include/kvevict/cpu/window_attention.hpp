// The SnapKV window scorer on the host (score/snapkv.hpp): a fused kernel through Highway where it is found, plain
// loops otherwise.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/window_scoring.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/check_scoring.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Working memory of score_on() for heads of at most `tokens` rows, to size an Arena beforehand. with_lse: the
// observation carries extras.lse.
inline std::size_t window_scratch_bytes(const score::SnapKV& scorer, const CacheShape& shape, index_t tokens,
                                        int threads = 1, bool with_lse = false) {
  const std::size_t bytes = detail::WindowScoring(scorer).head_scratch(shape, tokens, with_lse);
  return (bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment *
         static_cast<std::size_t>(std::clamp<index_t>(static_cast<index_t>(threads), 1, shape.kv_heads));
}

// out: [score_heads(shape)][most tokens of a head]; with group=none row h belongs to query head h. Window columns get
// -inf (protect=score: the layer's largest score + 1, and so do the sinks). Heads may differ in length.
// Throws std::invalid_argument for inputs that are missing or do not fit, std::domain_error for a NaN score.
// O(q_heads * window * tokens * head_dim_k).
template <CacheElement T>
void score_on(const host_exec& exec, const score::SnapKV& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  check_scoring(scorer, o, out);
  check_positions(score::SnapKV::name, o);
  const detail::WindowScoring scoring(scorer);
  std::size_t scratch = 0;
  for (index_t h = 0; h < o.shape.kv_heads; ++h)
    scratch = std::max(scratch, scoring.head_scratch(o.shape, o.tokens(h), !o.extras.lse.empty()));
  parallel_for(exec, o.shape.kv_heads, scratch, [&](std::int64_t h, std::span<std::byte> memory) {
    scoring.score_head(o, static_cast<index_t>(h), out, memory);
  });
  scoring.fill_unscored(o, out);
}

}  // namespace kvevict::inline KVEVICT_ABI
