// Oracle: scores in hindsight, from queries of the continuation that a policy cannot know. Mass recall (the share of
// attention mass on kept rows) is linear in what is kept, so the global top of these scores is the best selection there
// is for that metric: an upper bound for every policy under the same total, and no policy itself.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/score/head_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// score of a row = its share in the softmax over the prompt rows alone, summed over the continuation's queries and the
// query heads of the group; float64 inside. Only recorded dumps have such queries.
// O(q_heads * continuation * tokens * head_dim_k); memory per thread: the head's keys and two doubles per token.
struct Oracle : HeadScorer {
  static constexpr std::string_view name = "oracle";
  static constexpr Needs needs = Needs::keys | Needs::future_queries | Needs::softmax_scale;
  static constexpr bool heads_comparable = true;  // attention masses

  void score_head(const Head& head, std::span<float> out) const {
    const std::size_t tokens = head.tokens(), dim = head.key_dim();
    const auto scale = static_cast<double>(head.softmax_scale());
    std::vector<float> keys(tokens * dim);  // widened once for all queries
    for (std::size_t t = 0; t < tokens; ++t) std::copy_n(head.key(t).data(), dim, keys.data() + t * dim);
    std::vector<double> mass(tokens), logits(tokens);
    for (std::size_t g = 0; g < head.group(); ++g) {
      const FloatRows queries = head.future_queries(g);
      for (std::size_t i = 0; i < queries.size(); ++i) {
        const std::span<const float> q = queries[i];
        double most = -std::numeric_limits<double>::infinity(), sum = 0;
        for (std::size_t t = 0; t < tokens; ++t) {
          logits[t] = dot_double(q, std::span(keys).subspan(t * dim, dim)) * scale;
          most = std::max(most, logits[t]);
        }
        for (std::size_t t = 0; t < tokens; ++t) sum += logits[t] = std::exp(logits[t] - most);
        for (std::size_t t = 0; t < tokens; ++t) mass[t] += logits[t] / sum;
      }
    }
    std::transform(mass.begin(), mass.end(), out.begin(), [](double m) { return static_cast<float>(m); });
  }
};

}  // namespace kvevict::inline KVEVICT_ABI::score
