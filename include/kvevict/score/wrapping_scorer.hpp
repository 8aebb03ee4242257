// The base of scorers that wrap a scorer: chunks<keydiff> has the scorer keydiff inside. It says what it does to the
// scores of a head; everything else comes from what it wraps, unless it says otherwise by a member of its own.
#pragma once
#include <concepts>
#include <span>

#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/score/head.hpp"

namespace kvevict::inline KVEVICT_ABI::score {

// A wrapper that reads more than its base hides needs() with one that returns the union: WrappingScorer<Base>::needs()
// | Needs::values.
template <class Base>
struct WrappingScorer {
  Base base;

  Needs needs() const { return needs_of(base); }
  index_t window_rows() const { return base.window_rows(); }
  Protect protection() const { return base.protection(); }
  bool heads_comparable() const { return kvevict::heads_comparable(base); }
  index_t score_heads(const CacheShape& shape) const { return kvevict::score_heads(base, shape); }
};

// Changes the scores of one head in place. scores: [tokens of the head], as the base left them: -inf where it scores
// nothing. Called for several heads at once, from different threads.
template <class S>
concept RescoresHeads = requires(const S& s, const Head& head, std::span<float> scores) {
  s.base;
  { s.rescore_head(head, scores) } -> std::same_as<void>;
};

}  // namespace kvevict::inline KVEVICT_ABI::score
