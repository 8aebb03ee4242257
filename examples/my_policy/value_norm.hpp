// A scorer: rows with a large value vector stay, score = |v|_p. Copy it, rename it, change the loop.
#pragma once
#include <cmath>
#include <cstddef>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/score/head_scorer.hpp"

// HeadScorer brings sinks, protection and what every scorer needs besides its idea.
struct ValueNorm : kvevict::score::HeadScorer {
  static constexpr std::string_view name = "value-norm";
  static constexpr kvevict::Needs needs = kvevict::Needs::values;

  // Parameters are plain members with defaults; listed below, they can be set and printed by name.
  int norm = 2;  // 1 or 2

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("norm", self.norm);
    HeadScorer::parameters(self, visit);
  }

  void check() const {
    if (norm != 1 && norm != 2) kvevict::fail_argument("value-norm: norm=", norm, "; 1 or 2 is required");
  }

  void score_head(const kvevict::score::Head& head, std::span<float> out) const {
    for (std::size_t t = 0; t < head.tokens(); ++t) {
      out[t] = 0;
      for (const float x : head.value(t)) out[t] += norm == 1 ? std::abs(x) : x * x;
      if (norm == 2) out[t] = std::sqrt(out[t]);
    }
  }
};
