// Expected Attention: rows that future queries are expected to look at, if queries are normally distributed.
// Source: Expected Attention (Devoto et al., 2025, arXiv 2510.00636); kvpress' ExpectedAttentionPress.
//
//   mu, S: mean and covariance of the prompt's queries before RoPE, per query head
//   R = mean rotation over the next `future` positions; mu <- R mu, S <- R S R^T
//   z_j = c <mu, k_j> + c^2/2 k_j^T S k_j     log of the expected exp(c <q, k_j>), c = softmax_scale
//   s = mean over the group of softmax(z) over the rows after the sinks; score = (s + epsilon) |v|_2
#pragma once
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/score/concepts.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// The published setting is sinks=4 with statistics from row 4 on (q_stats_first); the default protects nothing, like
// every scorer that does not ask for more. Sinks have no score of their own: -inf, or with protect=score the layer's
// largest + 1. The next position is the head's last + 1. O(q_heads * tokens * head_dim_k^2 / 2).
struct Expected {
  static constexpr std::string_view name = "expected";
  static constexpr Needs needs =
      Needs::keys | Needs::values | Needs::positions | Needs::rope | Needs::q_stats | Needs::softmax_scale;
  static constexpr bool heads_comparable = true;  // expected attention masses

  index_t future = 512;    // positions that the rotation is averaged over
  index_t sinks = 0;       // rows that stay out of the softmax and are protected
  bool covariance = true;  // false: z without its second term
  bool value_norm = true;  // false: score = s
  float epsilon = 0.f;     // keeps large values in play where s is small
  ProtectShare protect = ProtectShare::half;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("future", self.future);
    visit("sinks", self.sinks);
    visit("covariance", self.covariance);
    visit("value_norm", self.value_norm);
    visit("epsilon", self.epsilon);
    visit("protect", self.protect);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {sinks, 0, protect}; }

  // Throws std::invalid_argument unless every parameter is legal.
  void check() const {
    if (future < 1) fail_argument(name, ": future=", future, "; 1 or more positions are required");
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
