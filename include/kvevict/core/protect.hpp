// Protection: index ranges that stay inside the budget whatever their score. Sinks first, then the newest rows.
#pragma once
#include <array>
#include <string_view>

#include "kvevict/config.hpp"
#include "kvevict/core/arithmetic.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// How much of a head's b kept rows may be protected: half = at most ceil(b / 2), full = at most b. `score` is for
// parity with kvpress alone: no range at all, the scorer gives these columns the layer's largest score + 1.
enum class ProtectShare { half, full, score };
constexpr auto words_of(ProtectShare) noexcept { return std::to_array<std::string_view>({"half", "full", "score"}); }

// Rows that a scorer asks to protect in every head.
struct Protect {
  index_t sinks = 0, window = 0;
  ProtectShare share = ProtectShare::half;
};

// Queries that a scorer with window `asked` looks with on a prompt of `tokens` rows: at most half of the prompt.
KVEVICT_HOST_DEVICE constexpr index_t window_rows_used(index_t asked, index_t tokens) noexcept {
  return detail::min(asked, tokens < 4 ? 1 : tokens / 2);
}

// What has to stay of one head, as counts of rows: `sinks` first and `newest` last ones as far as the share of its
// budget goes, the newest `recent` in any case. `before` and `after` rows at both ends lie outside the evictable range:
// they stay beside the budget, and the other counts begin where they end.
struct HeadProtect {
  index_t sinks = 0, newest = 0;
  ProtectShare share = ProtectShare::half;
  index_t recent = 0, before = 0, after = 0;
  KVEVICT_HOST_DEVICE constexpr index_t outside() const noexcept { return before + after; }
};

// Rows [0, sinks) and [tokens - newest, tokens) of a head; disjoint.
struct ProtectedRows {
  index_t sinks = 0, newest = 0;
  KVEVICT_HOST_DEVICE constexpr index_t count() const noexcept { return sinks + newest; }
};

// What `protect` asks for in a head of `tokens` rows, before any budget.
KVEVICT_HOST_DEVICE constexpr HeadProtect protect_asked(Protect protect, index_t tokens) noexcept {
  if (protect.share == ProtectShare::score) return {0, 0, protect.share};
  const index_t sinks = detail::min(protect.sinks, tokens);
  const index_t window = protect.window > 0 ? window_rows_used(protect.window, tokens) : 0;
  return {sinks, detail::min(window, tokens - sinks), protect.share};
}

// The same for a head of which only `range` may be evicted, and whose newest `recent` rows are guaranteed.
KVEVICT_HOST_DEVICE constexpr HeadProtect protect_asked(Protect protect, index_t tokens, index_t recent,
                                                        IndexRange range) noexcept {
  HeadProtect out = protect_asked(protect, tokens);
  out.before = range.begin;
  out.after = tokens - range.end;
  out.sinks = detail::min(detail::max(0, out.sinks - out.before), range.size());
  out.newest = detail::min(detail::max(0, out.newest - out.after), range.size() - out.sinks);
  out.recent = detail::min(detail::max(0, recent - out.after), range.size());
  return out;
}

// What is kept whatever the scores, where at most `cap` rows of the range may be protected. Sinks first, then the
// newest.
KVEVICT_HOST_DEVICE constexpr ProtectedRows protect_at_most(const HeadProtect& asked, index_t cap) noexcept {
  const index_t sinks = detail::min(asked.sinks, cap);
  const index_t newest = detail::max(detail::min(asked.newest, cap - sinks), asked.recent);
  return {detail::min(sinks, detail::max(cap, asked.recent) - newest), newest};
}

// What is protected in a head that keeps `budget` rows, those outside the range included.
KVEVICT_HOST_DEVICE constexpr ProtectedRows protect_within(const HeadProtect& asked, index_t budget) noexcept {
  const index_t own = budget - asked.outside();
  const index_t cap = asked.share == ProtectShare::half ? own / 2 + own % 2 : own;
  const ProtectedRows rows = protect_at_most(asked, cap);
  return {asked.before + rows.sinks, asked.after + rows.newest};
}

}  // namespace kvevict::inline KVEVICT_ABI
