// Rotary position embedding as data: how the keys and queries of a model were rotated.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

enum class RopeStyle { half, interleaved };  // element i pairs with i + rotary_dim / 2, or 2i with 2i + 1
constexpr auto words_of(RopeStyle) noexcept { return std::to_array<std::string_view>({"half", "interleaved"}); }

// At position p each pair i is rotated by the angle p * inv_freq[i]; elements from rotary_dim on are left alone.
struct Rope {
  RopeStyle style = RopeStyle::half;
  index_t rotary_dim = 0;
  std::span<const float> inv_freq;  // [rotary_dim / 2]
  float attention_factor = 1.f;     // multiplied into cos and sin (YaRN, LongRoPE)
  std::string_view no_shift{};      // why rows cannot be moved to other positions (M-RoPE, ...); empty: they can
};

}  // namespace kvevict::inline KVEVICT_ABI
