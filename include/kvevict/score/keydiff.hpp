// KeyDiff: rows whose keys point away from the mean direction of the head's keys stay.
// Source: KeyDiff (Park et al., 2025, arXiv 2504.15364); kvpress agrees.
#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/score/head_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// score = -cos(k, a), a = mean of k / |k| over all keys of the head. A zero key has cosine 0. The anchor is summed in
// float64. O(tokens * head_dim_k) per head, two passes over the keys.
struct KeyDiff : HeadScorer {
  static constexpr std::string_view name = "keydiff";
  static constexpr Needs needs = Needs::keys;
  static constexpr bool heads_comparable = true;  // cosines

  void score_head(const Head& head, std::span<float> out) const {
    std::vector<double> sum(head.key_dim());
    for (std::size_t t = 0; t < head.tokens(); ++t) {
      const std::span<const float> k = head.key(t);
      out[t] = norm(k);
      const float inverse = 1.f / std::max(out[t], 1e-12f);
      for (std::size_t c = 0; c < k.size(); ++c) sum[c] += static_cast<double>(k[c] * inverse);
    }
    std::vector<float> anchor(sum.size());
    for (std::size_t c = 0; c < sum.size(); ++c) anchor[c] = static_cast<float>(sum[c] / double(head.tokens()));
    const float length = norm(anchor);
    for (std::size_t t = 0; t < head.tokens(); ++t)
      out[t] = -dot(head.key(t), anchor) / std::max(out[t] * length, 1e-8f);
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::score
