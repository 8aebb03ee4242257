// Protection: index ranges that stay inside the budget whatever their score. Sinks first, then the newest rows.
#pragma once
#include <array>
#include <string_view>

#include "kvevict/config.hpp"
#include "kvevict/core/arithmetic.hpp"
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

// Rows of one head that are protected, as counts: rows [0, sinks) and [tokens - newest, tokens); disjoint.
struct ProtectedRows {
  index_t sinks = 0, newest = 0;
  KVEVICT_HOST_DEVICE constexpr index_t count() const noexcept { return sinks + newest; }
};

// What `protect` asks for in a head of `tokens` rows, before any budget.
KVEVICT_HOST_DEVICE constexpr ProtectedRows protect_asked(Protect protect, index_t tokens) noexcept {
  if (protect.share == ProtectShare::score) return {};
  const index_t sinks = detail::min(protect.sinks, tokens);
  const index_t window = protect.window > 0 ? window_rows_used(protect.window, tokens) : 0;
  return {sinks, detail::min(window, tokens - sinks)};
}

// The same cut to `most` rows: sinks first, then the newest.
KVEVICT_HOST_DEVICE constexpr ProtectedRows protect_at_most(ProtectedRows asked, index_t most) noexcept {
  const index_t sinks = detail::min(asked.sinks, most);
  return {sinks, detail::min(asked.newest, most - sinks)};
}

// What is protected in a head that keeps `budget` of its `tokens` rows.
KVEVICT_HOST_DEVICE constexpr ProtectedRows protect_within(Protect protect, index_t tokens, index_t budget) noexcept {
  const index_t most = protect.share == ProtectShare::half ? budget / 2 + budget % 2 : budget;
  return protect_at_most(protect_asked(protect, tokens), most);
}

}  // namespace kvevict::inline KVEVICT_ABI
