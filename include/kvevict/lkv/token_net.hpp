// LKV-T: which rows stay (arXiv 2605.06676). Every (layer, head) owns a small network over a row's key and value,
//
//   score = silu([key ; value ; features] W1 + b1) . w2
//
// blind to queries and linear in the number of rows. The paper feeds the key as cached, after RoPE; keys before RoPE
// and two features of the distance to the newest prompt row make the scores carry over to prompts longer than those of
// the training (docs/policies/lkv.md). Scores are never standardised: their scale decides how much the training noise
// matters. This header holds the types alone.
#pragma once
#include <array>
#include <cmath>
#include <string_view>

#include "kvevict/config.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// The frame of the key that the network sees: as cached, or rotated back to position 0.
enum class KeyFrame { post_rope, pre_rope };
constexpr auto words_of(KeyFrame) noexcept { return std::to_array<std::string_view>({"post-rope", "pre-rope"}); }

// Inputs behind key and value: nothing, or two functions of the distance to the newest prompt row.
enum class TokenFeatures { none, distance };
constexpr auto words_of(TokenFeatures) noexcept { return std::to_array<std::string_view>({"none", "distance"}); }

struct TokenInput {
  KeyFrame key_frame = KeyFrame::post_rope;
  TokenFeatures features = TokenFeatures::none;

  constexpr index_t features_count() const noexcept { return features == TokenFeatures::distance ? 2 : 0; }
  friend bool operator==(const TokenInput&, const TokenInput&) = default;
};

// distance: rows between a token and the newest prompt row, 0 for that row itself. One feature for the far, one for
// the last few dozen rows, both of order one; they are not standardised.
inline std::array<float, 2> distance_features(index_t distance) noexcept {
  const auto d = static_cast<float>(distance);
  return {0.5f * std::log1p(d) - 2.f, 3.f * std::exp(-d / 16.f)};
}

// A score as it is given out: one that is no finite number, because an element of its row is none or because a sum
// overflowed, is NaN in every build and on every backend, so that a planner names the row.
KVEVICT_HOST_DEVICE constexpr float finite_or_nan(float score) noexcept {
  return score - score == 0.f ? score : score - score;
}

// Weights of one head, or their gradients (T not const).
template <class T>
struct TokenNet {
  index_t inputs = 0;  // head_dim_k + head_dim_v + features
  index_t hidden = 0;
  T* w1 = nullptr;  // [inputs][hidden]
  T* b1 = nullptr;  // [hidden]
  T* w2 = nullptr;  // [hidden]
};

}  // namespace kvevict::inline KVEVICT_ABI
