// Oracle: scores in hindsight, from queries of the continuation that a policy cannot know. Mass recall (the share of
// attention mass on kept rows) is linear in what is kept, so the global top of these scores is the best selection there
// is for that metric: an upper bound for every policy under the same total, and no policy itself.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "kvevict/core/parallel.hpp"
#include "kvevict/score/detail/row_math.hpp"
#include "kvevict/score/detail/scorer_support.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// score of a row = its share in the softmax over the prompt rows alone, summed over the continuation's queries and the
// query heads of the group; float64 inside. Only recorded dumps have such queries.
// O(q_heads * continuation * tokens * head_dim_k); scratch per thread: the head's keys and two doubles per token.
struct Oracle {
  static constexpr std::string_view name = "oracle";
  static constexpr Needs needs = Needs::keys | Needs::future_queries;
  static constexpr bool heads_comparable = true;  // attention masses

  index_t sinks = 0;
  ProtectShare protect = ProtectShare::half;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks);
    visit("protect", self.protect);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {sinks, 0, protect}; }

  // out: [kv_heads][most tokens of a head].
  template <CacheElement T>
  friend void score_on(const host_exec& exec, const Oracle& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(exec, o, out);
  }

 private:
  template <class T>
  void score_layer(const host_exec& exec, const LayerObservation<T>& o, Matrix<float> out) const {
    detail::check_scoring(name, needs, sinks, o, out);
    if (std::ssize(o.extras.future_queries) != o.shape.q_heads)
      fail_argument(name, ": layer ", o.layer, " has continuation queries of ", o.extras.future_queries.size(),
                    " query heads; the shape says ", o.shape.q_heads);
    const auto tokens = static_cast<std::size_t>(o.most_tokens()), dim = static_cast<std::size_t>(o.shape.head_dim_k);
    parallel_for(exec, out.rows, 2 * tokens * sizeof(double) + (tokens + 2) * dim * sizeof(float),
                 [&](std::int64_t h, std::span<std::byte> scratch) {
                   auto* mass = reinterpret_cast<double*>(scratch.data());
                   auto* logits = mass + tokens;
                   auto* floats = reinterpret_cast<float*>(logits + tokens);
                   score_head(o, static_cast<index_t>(h), mass, logits, floats, out.row(static_cast<index_t>(h)));
                 });
    detail::raise_sinks(protect, sinks, o, out);
  }

  template <class T>
  static void score_head(const LayerObservation<T>& o, index_t head, double* mass, double* logits, float* floats,
                         float* out) {
    const Rows<const T>& keys = o.keys[static_cast<std::size_t>(head)];
    const std::int64_t tokens = keys.rows;
    const index_t dim = keys.cols;
    float* query_buffer = floats + tokens * dim;
    for (std::int64_t j = 0; j < tokens; ++j) {  // widened once for all queries
      const float* k = detail::float_row(keys, j, floats + j * dim);
      if (k != floats + j * dim) std::copy_n(k, dim, floats + j * dim);
    }
    std::fill_n(mass, tokens, 0.0);
    const index_t group = o.shape.group();
    for (index_t g = 0; g < group; ++g) {
      const Rows<const T>& queries = o.extras.future_queries[static_cast<std::size_t>(head * group + g)];
      for (std::int64_t i = 0; i < queries.rows; ++i) {
        const float* q = detail::float_row(queries, i, query_buffer);
        double most = -std::numeric_limits<double>::infinity(), sum = 0;
        for (std::int64_t j = 0; j < tokens; ++j) {
          logits[j] = detail::dot_double(q, floats + j * dim, dim) * static_cast<double>(o.softmax_scale);
          most = std::max(most, logits[j]);
        }
        for (std::int64_t j = 0; j < tokens; ++j) sum += logits[j] = std::exp(logits[j] - most);
        for (std::int64_t j = 0; j < tokens; ++j) mass[j] += logits[j] / sum;
      }
    }
    for (std::int64_t j = 0; j < tokens; ++j) out[j] = static_cast<float>(mass[j]);
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
