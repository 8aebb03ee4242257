// What a scorer is: it ranks the tokens of each head of one layer. Scores are float32, larger = keep.
#pragma once
#include <concepts>
#include <string_view>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/observe/observation.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Inputs that a scorer cannot do without, as a bit set.
enum class Needs : unsigned {
  none = 0,
  keys = 1,
  values = 2,
  positions = 4,
  rope = 8,
  window_queries = 16,
  lse = 32,
  attn_sum = 64,
  q_stats = 128,
  o_proj = 256,
  future_queries = 512
};
constexpr Needs operator|(Needs a, Needs b) noexcept {
  return static_cast<Needs>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr bool includes_need(Needs set, Needs one) noexcept {
  return (static_cast<unsigned>(set) & static_cast<unsigned>(one)) != 0;
}

// score_on(exec, scorer, observation, out), found by argument-dependent lookup, so that each backend says itself which
// scorers it has: out is [score heads][most tokens of a head]; columns past a head's tokens are left
// alone; columns that the scorer does not score (its window) get -inf. Optional members:
//   static constexpr bool heads_comparable   scores of different heads may be compared as they are (default false)
//   index_t score_heads(CacheShape) const    rows of `out` where they are not the KV heads (group=none: q_heads)
template <class S, class T, class Exec = host_exec>
concept TokenScorer = std::copyable<S> &&
    requires(const S& s, const Exec& exec, const LayerObservation<T>& o, Matrix<float> out) {
  { s.needs } -> std::convertible_to<Needs>;
  { s.window_rows() } -> std::same_as<index_t>;  // 0: looks with no window
  { s.protection() } -> std::same_as<Protect>;
  { score_on(exec, s, o, out) } -> std::same_as<void>;
};

template <class S>
constexpr bool heads_comparable(const S& scorer) {
  if constexpr (requires { scorer.heads_comparable; }) return scorer.heads_comparable;
  else return false;
}

// Rows of the score matrix: the KV heads unless the scorer says otherwise.
template <class S>
index_t score_heads(const S& scorer, const CacheShape& shape) {
  if constexpr (requires { scorer.score_heads(shape); }) return scorer.score_heads(shape);
  else return shape.kv_heads;
}

// Throws std::invalid_argument naming the scorer, the missing input and both numbers, unless `o` holds what is needed.
// With a window, a prompt of t tokens needs min(window, max(1, t / 2)) recorded query rows.
template <class T>
void check_inputs(std::string_view scorer, Needs needs, index_t window, const LayerObservation<T>& o) {
  const auto missing = [&](std::string_view input) {
    fail_argument(scorer, ": layer ", o.layer, " has no ", input, "; this scorer needs it");
  };
  if (includes_need(needs, Needs::window_queries)) {
    const index_t used = window_rows_used(window, o.most_tokens());
    const auto recorded = static_cast<index_t>(o.window_queries.empty() ? 0 : o.window_positions.size());
    if (recorded < used)
      fail_argument(scorer, ": window of ", used, " queries asked, but layer ", o.layer, " has ", recorded,
                    " recorded window queries (window_queries); record more or ask for a smaller window");
  }
  if (includes_need(needs, Needs::rope) && o.rope.inv_freq.empty()) missing("RoPE description (rope)");
  if (includes_need(needs, Needs::lse) && o.extras.lse.empty()) missing("row log-sum-exp (lse)");
  if (includes_need(needs, Needs::attn_sum) && o.extras.attn_sum.empty()) missing("attention column sums (attn_sum)");
  if (includes_need(needs, Needs::q_stats) && (o.extras.q_mean.empty() || o.extras.q_cov.empty()))
    missing("query statistics (q_mean, q_cov)");
  if (includes_need(needs, Needs::o_proj) && o.extras.o_proj.data == nullptr) missing("output projection (o_proj)");
  if (includes_need(needs, Needs::future_queries) && o.extras.future_queries.empty())
    missing("continuation queries (only recorded dumps have them)");
}

}  // namespace kvevict::inline KVEVICT_ABI
