// Knorm: rows with a small key norm stay.
// Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., 2024, arXiv
// 2406.11430); its code and kvpress agree.
#pragma once
#include <cstddef>
#include <span>
#include <string_view>

#include "kvevict/score/head_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// score = -|k|_2 of the key as it lies in the cache, in float32. O(tokens * head_dim_k) per head.
struct KNorm : HeadScorer {
  static constexpr std::string_view name = "knorm";
  static constexpr Needs needs = Needs::keys;

  void score_head(const Head& head, std::span<float> out) const {
    for (std::size_t t = 0; t < head.tokens(); ++t) out[t] = -norm(head.key(t));
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::score
