// How heads share rows by their scores, as data: an allocator says what is set aside, what is reserved and what is
// ranked; a backend counts (cpu/split_rows.hpp, cuda/select.cuh). Ada-KV shares in a layer, global allocation over all.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/core/arithmetic.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI {

// How scores of different heads become comparable. automatic: as they are where the scorer says that they are
// comparable, else softmax; none: as they are; softmax: normalised by softmax per head.
enum class Normalize { automatic, none, softmax };
constexpr auto words_of(Normalize) noexcept { return std::to_array<std::string_view>({"auto", "none", "softmax"}); }

// Heads that share rows: those of one layer, or those of all layers one after the other.
struct SharingHeads {
  index_t layer = 0;                         // for messages; of no meaning where all layers share
  std::span<const index_t> tokens;           // [heads], rows of the evictable range
  Protect asked;                             // by the scorer, in every head
  std::span<const HeadProtect> protections;  // [heads], what that comes to
  bool comparable = false;                   // scores of different heads may be compared as they are

  std::int64_t heads() const noexcept { return std::ssize(tokens); }
};

// One head's part: rows of its range that are set aside before scores decide, and best scored rows reserved besides.
struct HeadShare {
  ProtectedRows aside;
  index_t reserved = 0;
};

struct ScoreSplit {
  std::vector<HeadShare> shares;  // [heads]
  std::int64_t ranked = 0;        // rows that go by score, reserved ones included
  bool softmax = false;           // scores become log-softmax per head before heads are compared
  index_t weighed_by = 0;         // above 0: a head's scores count times the share that its best so many rows hold

  // Rows that go by score and are not reserved: they belong to the best of all heads.
  std::int64_t contested() const {
    std::int64_t out = ranked;
    for (const HeadShare& s : shares) out -= s.reserved;
    return out;
  }
};

namespace detail {

// Rows of a head that are set aside, where `total` rows go to `heads` heads (m = total / heads): at most ceil(m / 2)
// with protect=half, floor(m) with protect=full. The heads' sums stay within the total.
constexpr ProtectedRows set_aside(const HeadProtect& asked, index_t tokens, std::int64_t total,
                                  std::int64_t heads) noexcept {
  const std::int64_t cap =
      asked.share == ProtectShare::half ? ceil_div(total, 2 * heads) : max<std::int64_t>(1, total / heads);
  return protect_at_most(asked, static_cast<index_t>(min<std::int64_t>(cap, tokens)));
}

// `total` rows for the heads, each of which keeps `reserve` at least, or all it has.
inline ScoreSplit split_with_reserve(const SharingHeads& heads, std::int64_t total, std::int64_t reserve,
                                     bool set_any_aside = true) {
  ScoreSplit out;
  out.ranked = total;
  for (std::size_t h = 0; h < heads.tokens.size(); ++h) {
    HeadProtect asked = heads.protections[h];
    if (!set_any_aside) asked.sinks = asked.newest = 0;
    const ProtectedRows aside = set_aside(asked, heads.tokens[h], total, heads.heads());
    const std::int64_t beside = std::min<std::int64_t>(reserve, heads.tokens[h]) - aside.count();
    out.shares.push_back({aside, static_cast<index_t>(std::max<std::int64_t>(0, beside))});
    out.ranked -= aside.count();
  }
  return out;
}

// The log of a softmax: the same order, but small shares keep theirs where a float softmax would underflow to equal
// zeros. Infinities and NaN stay. max, log_sum: of the finite scores of the row.
KVEVICT_HOST_DEVICE constexpr float log_share(float score, float max, float log_sum) noexcept {
  return is_finite_score(score) ? (score - max) - log_sum : score;
}

}  // namespace detail
}  // namespace kvevict::inline KVEVICT_ABI
