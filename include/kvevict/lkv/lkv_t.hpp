// The scorer `lkv-t`: scores learned per token (arXiv 2605.06676; the network is in token_net.hpp).
#pragma once
#include <cstddef>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/lkv/lkv_file.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

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
};

}  // namespace score

// Throws std::invalid_argument unless the observation says how keys were rotated, for checkpoints that were trained on
// keys before RoPE.
template <class T>
void check_key_frame(std::string_view scorer, const LayerObservation<T>& o) {
  check_inputs(scorer, Needs::rope, 0, o);
  if (o.rope.rotary_dim < 2 || o.rope.rotary_dim > o.shape.head_dim_k ||
      o.rope.inv_freq.size() != static_cast<std::size_t>(o.rope.rotary_dim / 2))
    fail_argument(scorer, ": layer ", o.layer, ": RoPE rotates ", o.rope.rotary_dim, " values by ",
                  o.rope.inv_freq.size(), " frequencies, keys have ", o.shape.head_dim_k);
}

}  // namespace kvevict::inline KVEVICT_ABI
