// The scorer `lkv-t`: scores learned per token (arXiv 2605.06676; the network is in token_net.hpp).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/token_network.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/token_input.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Scores of all heads of one layer by their networks, float32. net(head) gives a head's TokenNet<const float>.
// out: [kv_heads][most tokens of a head]. O(tokens * inputs * hidden), memory independent of the number of tokens.
// Scores are the same for any number of threads, bit for bit.
template <class T, class NetOf>
void token_scores(const host_exec& exec, const LayerObservation<T>& o, TokenInput input, NetOf&& net,
                  Matrix<float> out) {
  constexpr index_t block = 48 / detail::token_tile * detail::token_tile;  // rows that are widened at once
  constexpr std::int64_t share = 32 * block;                               // rows of one task
  TokenFrame frame{input, nullptr, 0};
  for (const auto& p : o.positions)
    if (!p.empty()) frame.newest = std::max(frame.newest, p.back());
  std::optional<KeyUnrotation> unrotation;
  if (input.key_frame == KeyFrame::pre_rope) frame.unrotation = &unrotation.emplace(o.rope, frame.newest);

  const std::int64_t shares = (o.most_tokens() + share - 1) / share;
  std::size_t packed = 0, inputs = 0, work = 0;
  for (index_t h = 0; h < o.shape.kv_heads; ++h) {
    const TokenNet<const float> n = net(h);
    packed = std::max(packed, (detail::packed_weights_floats(n.inputs, n.hidden) + 15) / 16 * 16);
    inputs = std::max(inputs, static_cast<std::size_t>(block) * static_cast<std::size_t>(n.inputs));
    work = std::max(work, detail::token_kernel_floats(block, n.hidden));
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
      std::copy(scores, scores + count, out.row(head) + first);
    }
  });
}

namespace score {

// Query-agnostic: needs keys and values alone, and positions and RoPE where the checkpoint was trained on keys before
// RoPE or with distance features. Protects nothing. Scores of different heads have their own scales: Ada-KV compares
// them after a softmax per head.
struct LkvT {
  static constexpr std::string_view name = "lkv-t";
  static constexpr Needs needs = Needs::keys | Needs::values | Needs::positions;
  static constexpr bool heads_comparable = false;

  LkvFile file;  // a checkpoint made for this model

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("file", self.file);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {}; }

  template <class T>
  friend void score_on(const host_exec& exec, const LkvT& s, const LayerObservation<T>& o, Matrix<float> out) {
    const LkvCheckpoint& checkpoint = s.file.checkpoint(name);
    checkpoint.check_fits(name, o.shape);
    const TokenInput input = checkpoint.sizes().input;
    if (input.key_frame == KeyFrame::pre_rope) {
      check_inputs(name, Needs::rope, 0, o);
      if (o.rope.rotary_dim > o.shape.head_dim_k ||
          o.rope.inv_freq.size() != static_cast<std::size_t>(o.rope.rotary_dim / 2))
        fail_argument(name, ": layer ", o.layer, ": RoPE turns ", o.rope.rotary_dim, " values by ",
                      o.rope.inv_freq.size(), " frequencies, keys have ", o.shape.head_dim_k);
    }
    token_scores(
        exec, o, input, [&](index_t head) { return checkpoint.token_net(o.layer, head); }, out);
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
