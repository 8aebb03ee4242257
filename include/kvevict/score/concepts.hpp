// What a scorer is: it ranks the tokens of each head of one layer. Scores are float32, larger = keep.
#pragma once
#include <array>
#include <cmath>
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
  future_queries = 512,
  softmax_scale = 1024
};
constexpr Needs operator|(Needs a, Needs b) noexcept {
  return static_cast<Needs>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr Needs operator&(Needs a, Needs b) noexcept {
  return static_cast<Needs>(static_cast<unsigned>(a) & static_cast<unsigned>(b));
}
constexpr bool includes_need(Needs set, Needs one) noexcept { return (set & one) != Needs::none; }

// What a scorer needs: a constant of its type, or a function where it depends on what it wraps.
template <class S>
requires requires(const S& scorer) { scorer.needs; } || requires(const S& scorer) {
  scorer.needs();
}
constexpr Needs needs_of(const S& scorer) {
  if constexpr (requires { scorer.needs(); }) return scorer.needs();
  else return scorer.needs;
}

// What a policy asks of a scorer, whatever backend runs it and whatever the cache holds.
template <class S>
concept Scorer = std::copyable<S> && requires(const S& s) {
  { needs_of(s) } -> std::same_as<Needs>;
  { s.window_rows() } -> std::same_as<index_t>;  // 0: looks with no window
  { s.protection() } -> std::same_as<Protect>;
};

// score_on(exec, scorer, observation, out), found by argument-dependent lookup, so that each backend says itself which
// scorers it has (cpu/, cuda/): out is [score heads][most tokens of a head]; columns past a head's tokens are left
// alone; columns that the scorer does not score (its window) get -inf. Optional members, constants or functions:
//   bool heads_comparable                    scores of different heads may be compared as they are (default false)
//   index_t score_heads(CacheShape) const    rows of `out` where they are not the KV heads (group=none: q_heads)
//   void check() const                       throws std::invalid_argument unless every parameter is legal
template <class S, class T, class Exec = host_exec>
concept TokenScorer = Scorer<S> &&
    requires(const S& s, const Exec& exec, const LayerObservation<T>& o, Matrix<float> out) {
  { score_on(exec, s, o, out) } -> std::same_as<void>;
};

template <class S>
constexpr bool heads_comparable(const S& scorer) {
  if constexpr (requires { scorer.heads_comparable(); }) return scorer.heads_comparable();
  else if constexpr (requires { scorer.heads_comparable; }) return scorer.heads_comparable;
  else return false;
}

// Rows of the score matrix: the KV heads unless the scorer says otherwise.
template <class S>
index_t score_heads(const S& scorer, const CacheShape& shape) {
  if constexpr (requires { scorer.score_heads(shape); }) return scorer.score_heads(shape);
  else return shape.kv_heads;
}

namespace detail {

struct InputName {
  Needs need;
  std::string_view name;
};
inline constexpr auto input_names = std::to_array<InputName>({
    {Needs::rope, "RoPE description (rope)"},
    {Needs::lse, "row log-sum-exp (lse)"},
    {Needs::attn_sum, "attention column sums (attn_sum)"},
    {Needs::q_stats, "query statistics (q_mean, q_cov)"},
    {Needs::o_proj, "output projection (o_proj)"},
    {Needs::future_queries, "continuation queries (only recorded dumps have them)"},
});

// The inputs of that table that an observation holds.
template <class T>
Needs held_inputs(const LayerObservation<T>& o) {
  const auto where = [](bool held, Needs need) { return held ? need : Needs::none; };
  return where(!o.rope.inv_freq.empty(), Needs::rope) | where(!o.extras.lse.empty(), Needs::lse) |
         where(!o.extras.attn_sum.empty(), Needs::attn_sum) |
         where(!o.extras.q_mean.empty() && !o.extras.q_cov.empty(), Needs::q_stats) |
         where(o.extras.o_proj.data != nullptr, Needs::o_proj) |
         where(!o.extras.future_queries.empty(), Needs::future_queries);
}

}  // namespace detail

// Throws std::invalid_argument naming the scorer, the missing input and both numbers, unless `o` holds what is needed.
// With a window, a prompt of t tokens needs min(window, max(1, t / 2)) recorded query rows.
template <class T>
void check_inputs(std::string_view scorer, Needs needs, index_t window, const LayerObservation<T>& o) {
  if (includes_need(needs, Needs::window_queries)) {
    const index_t used = o.most_tokens() == 0 ? 0 : window_rows_used(window, o.most_tokens());
    const auto recorded = static_cast<index_t>(o.window_queries.empty() ? 0 : o.window_positions.size());
    if (recorded < used)
      fail_argument(scorer, ": window of ", used, " queries asked, but layer ", o.layer, " has ", recorded,
                    " recorded window queries (window_queries); record more or ask for a smaller window");
  }
  const Needs held = detail::held_inputs(o);
  for (const auto& input : detail::input_names)
    if (includes_need(needs, input.need) && !includes_need(held, input.need))
      fail_argument(scorer, ": layer ", o.layer, " has no ", input.name, "; this scorer needs it");
  if (includes_need(needs, Needs::softmax_scale) && !(std::isfinite(o.softmax_scale) && o.softmax_scale > 0.f))
    fail_argument(scorer, ": layer ", o.layer, " has softmax_scale=", o.softmax_scale,
                  "; the factor of the model's attention logits is required (1 / sqrt(head_dim_k) in most models)");
}

}  // namespace kvevict::inline KVEVICT_ABI
