// LKV-T on the host (lkv/lkv_t.hpp): the networks of one layer.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/token_kernel.hpp"
#include "kvevict/cpu/token_input.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/lkv_t.hpp"
#include "kvevict/lkv/token_net.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/check_scoring.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Scores of all heads of one layer by their networks, float32. net(head) gives a head's TokenNet<const float>.
// out: [kv_heads][most tokens of a head]. O(tokens * inputs * hidden), memory independent of the number of tokens.
// Scores are the same for any number of threads, bit for bit; between builds and backends they differ by at most 1e-5
// of the head's largest score, and agree on which are NaN.
template <class T, class NetOf>
void token_scores(const host_exec& exec, const LayerObservation<T>& o, TokenInput input, NetOf&& net,
                  Matrix<float> out) {
  constexpr index_t block = 48 / detail::token_tile * detail::token_tile;  // rows that are widened at once
  constexpr std::int64_t share = 32 * block;                               // rows of one task
  TokenFrame frame{input, nullptr, 0};
  for (const auto& p : o.positions)
    if (!p.empty()) frame.newest = std::max(frame.newest, p.back());
  std::optional<InverseRotation> inverse;
  if (input.key_frame == KeyFrame::pre_rope) frame.inverse = &inverse.emplace(o.rope, frame.newest);

  const std::int64_t shares = (o.most_tokens() + share - 1) / share;
  std::size_t packed = 0, inputs = 0, work = 0;
  for (index_t h = 0; h < o.shape.kv_heads; ++h) {
    const TokenNet<const float> n = net(h);
    packed = std::max(packed, (detail::packed_weights_floats(n.inputs, n.hidden) + 15) / 16 * 16);
    inputs = std::max(inputs, static_cast<std::size_t>(block) * static_cast<std::size_t>(n.inputs));
    work = std::max(work, detail::token_kernel_floats(block));
  }
  const std::size_t floats = packed + inputs + work + static_cast<std::size_t>(block);
  parallel_for(exec, o.shape.kv_heads * shares, floats * sizeof(float), [&](std::int64_t i, std::span<std::byte> s) {
    const auto head = static_cast<index_t>(i / shares);
    const auto at = static_cast<std::size_t>(head);
    const std::int64_t begin = i % shares * share, end = std::min(begin + share, o.keys[at].rows);
    if (begin >= end) return;
    const TokenNet<const float> n = net(head);
    float* const weights = reinterpret_cast<float*>(s.data());
    float* const x = weights + packed;
    float* const memory = x + inputs;
    float* const scores = memory + work;
    detail::pack_weights(n, weights);
    for (std::int64_t first = begin; first < end; first += block) {
      const auto count = static_cast<index_t>(std::min<std::int64_t>(block, end - first));
      const index_t tiled = (count + detail::token_tile - 1) / detail::token_tile * detail::token_tile;
      token_inputs(o.keys[at], o.values[at], o.positions[at], frame, first, count, x);
      std::fill(x + std::int64_t{count} * n.inputs, x + std::int64_t{tiled} * n.inputs, 0.f);
      detail::token_block_scores(n, weights, x, tiled, memory, scores);
      std::transform(scores, scores + count, out.row(head) + first, finite_or_nan);
    }
  });
}

// out: [kv_heads][most tokens of a head]. Throws std::invalid_argument where the checkpoint was made for another model
// or the observation lacks what it was trained with.
template <CacheElement T>
void score_on(const host_exec& exec, const score::LkvT& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  const LkvCheckpoint& checkpoint = scorer.file.checkpoint(score::LkvT::name);
  checkpoint.check_fits(score::LkvT::name, o.shape);
  check_scoring(scorer, o, out);
  check_positions(score::LkvT::name, o);
  const TokenInput input = checkpoint.sizes().input;
  if (input.key_frame == KeyFrame::pre_rope) check_key_frame(score::LkvT::name, o);
  token_scores(
      exec, o, input, [&](index_t head) { return checkpoint.token_net(o.layer, head); }, out);
}

}  // namespace kvevict::inline KVEVICT_ABI
