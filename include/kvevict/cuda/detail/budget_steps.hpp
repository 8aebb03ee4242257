// Rows per head on the device: uniform floors, Ada-KV's reservation and exact sum, and where each row's indices begin.
// The rules are those of allocate/uniform.hpp and allocate/ada.hpp, row for row.
#pragma once
#include <cstdint>

#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/group_steps.hpp"
#include "kvevict/cuda/detail/rules.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// ---- uniform ----
struct UniformArgs {
  const index_t* tokens;  // [rows]
  index_t rows;
  std::int64_t total;  // rows to keep; below 0: floor(retain_millionths * all / 10^6), at least one per non-empty row
  std::int64_t retain_millionths;
  bool exact;        // hand out what the floors leave over, by largest remainder
  index_t* budgets;  // [rows]
};
struct UniformShared {
  BlockScratch scratch;
};

// One block. O(rows), and O(rows^2 / threads) with `exact`.
template <class Cta>
KVEVICT_DEVICE void uniform_budgets(Cta& cta, const UniformArgs& args, UniformShared& shared) {
  std::int64_t own = 0, holding = 0;
  for (index_t r = cta.thread(); r < args.rows; r += cta.threads()) {
    own += args.tokens[r];
    holding += args.tokens[r] > 0;
  }
  const std::int64_t full = block_scan(cta, own, shared.scratch).total;
  const std::int64_t minimum = block_scan(cta, holding, shared.scratch).total;
  std::int64_t total = args.total;
  if (total < 0) total = max(minimum, scaled_floor(full, args.retain_millionths, 1'000'000));
  if (full == 0) total = 0;
  std::int64_t given = 0, floors = 0;
  for (index_t r = cta.thread(); r < args.rows; r += cta.threads())
    floors += full == 0 ? 0 : scaled_floor(total, args.tokens[r], full);
  const std::int64_t left = total - block_scan(cta, floors, shared.scratch).total;
  for (index_t r = cta.thread(); r < args.rows; r += cta.threads()) {
    const std::int64_t tokens = args.tokens[r];
    std::int64_t rows = full == 0 ? 0 : scaled_floor(total, tokens, full);
    if (args.exact && full != 0) {
      const std::int64_t remainder = share_remainder(total, tokens, full);
      std::int64_t before = 0;  // rows that are handed a left-over before this one
      for (index_t o = 0; o < args.rows && before < left; ++o)
        before += o != r && before_by_remainder(share_remainder(total, args.tokens[o], full), o, remainder, r);
      rows += before < left;
    }
    rows = max(rows, min<std::int64_t>(tokens, 1));
    given += rows;
    args.budgets[r] = static_cast<index_t>(rows);
  }
  std::int64_t sum = block_scan(cta, given, shared.scratch).total;  // its barriers make the budgets visible to thread 0
  if (cta.thread() != 0) return;
  for (; sum > total; --sum) {  // rows raised to the minimum are paid by the row that keeps most (ties: lower row)
    index_t from = -1;
    for (index_t r = 0; r < args.rows; ++r)
      if (args.budgets[r] > min<index_t>(args.tokens[r], 1) && (from < 0 || args.budgets[r] > args.budgets[from]))
        from = r;
    if (from < 0) return;
    --args.budgets[from];
  }
}

// ---- Ada-KV ----
struct AdaArgs {
  const index_t* tokens;  // [groups * heads]
  index_t groups, heads;
  Protect protect;
  const std::int64_t* totals;     // [groups]; rows of each layer
  std::int64_t floor_millionths;  // share of the mean that every head keeps
  std::int64_t reserve;           // rows that every head keeps; 0: max(1, floor(floor * total / heads))
  index_t* reserved;              // [groups * heads]; set aside and reserved by score
  RankedRange* ranges;            // [groups * heads]
  std::uint32_t* want;            // [groups]; rows that go to the layer's best remaining entries
  index_t* budgets;               // [groups * heads]
  unsigned long long* error;
  std::int64_t first_row;
};
struct AdaShared {
  BlockScratch scratch;
};

// First step, block x = group x: what every head keeps whatever the others hold.
template <class Cta>
KVEVICT_DEVICE void reserve_rows(Cta& cta, const AdaArgs& args, AdaShared& shared) {
  const index_t group = cta.block_x();
  const std::int64_t first = std::int64_t{group} * args.heads, total = args.totals[group];
  std::int64_t held = 0, fixed = 0;
  for (index_t h = cta.thread(); h < args.heads; h += cta.threads()) held += args.tokens[first + h];
  const bool all = block_scan(cta, held, shared.scratch).total <= total;
  const std::int64_t reserve = args.reserve > 0 ? args.reserve : ada_reserve(total, args.heads, args.floor_millionths);
  for (index_t h = cta.thread(); h < args.heads; h += cta.threads()) {
    const index_t tokens = args.tokens[first + h];
    const ProtectedRows aside = set_aside(args.protect, tokens, total, args.heads);
    const index_t rows = all ? tokens : aside.count() + ada_least(reserve, tokens, aside);
    args.reserved[first + h] = rows;
    args.ranges[first + h] = all ? RankedRange{0, 0} : RankedRange{aside.sinks, tokens - aside.newest};
    fixed += rows;
  }
  const std::int64_t sum = block_scan(cta, fixed, shared.scratch).total;
  if (cta.thread() != 0) return;
  args.want[group] = static_cast<std::uint32_t>(all ? 0 : max<std::int64_t>(0, total - sum));
  if (!all && sum > total) cta.smallest_global(*args.error, error_word(Fault::bad_plan, args.first_row + first, 0));
}

// Last step, block x = group x, after the cut is known: the rows of each head.
template <class Cta>
KVEVICT_DEVICE void share_rows(Cta& cta, const AdaArgs& ada, const GroupArgs& args, AdaShared& shared) {
  const index_t group = cta.block_x();
  const std::int64_t first = std::int64_t{group} * ada.heads;
  const Threshold cut = cut_of(*args.state(FixedDigits::passes, group));
  std::uint32_t ties = cut.ties > 0 ? static_cast<std::uint32_t>(cut.ties) : 0u;
  for (index_t base = 0; base < ada.heads; base += cta.threads()) {
    const std::int64_t row = first + base + cta.thread();
    const bool in = base + cta.thread() < ada.heads;
    std::uint32_t above = 0, equal = 0;
    if (in) {
      for (index_t c = 0; c < args.chunks; ++c) {
        above += static_cast<std::uint32_t>(args.counts[row * args.chunks + c].above);
        equal += static_cast<std::uint32_t>(args.counts[row * args.chunks + c].equal);
      }
      const auto extra = static_cast<std::uint32_t>(args.extra[row]);
      if (cut.above(args.ceilings[row])) above += extra;
      if (cut.equal(args.ceilings[row])) equal += extra;
    }
    const Scanned<std::uint32_t> before = block_scan(cta, equal, shared.scratch);
    const std::uint32_t left = before.before < ties ? ties - before.before : 0u;
    if (in) ada.budgets[row] = ada.reserved[row] + static_cast<index_t>(above + min(left, equal));
    ties -= min(ties, before.total);
  }
}

// ---- offsets ----
struct OffsetArgs {
  const index_t* tokens;   // [rows]
  const index_t* budgets;  // [rows]
  index_t rows;
  std::int64_t* offsets;  // [rows + 1], from 0
};
struct OffsetShared {
  BlockScratch scratch;
};

// One block: offsets of rows that keep min(budget, tokens) each.
template <class Cta>
KVEVICT_DEVICE void scan_offsets(Cta& cta, const OffsetArgs& args, OffsetShared& shared) {
  std::int64_t done = 0;
  if (cta.thread() == 0) args.offsets[0] = 0;
  for (std::int64_t base = 0; base < args.rows; base += cta.threads()) {
    const std::int64_t r = base + cta.thread();
    const std::int64_t kept = r < args.rows ? min(max<index_t>(0, args.budgets[r]), args.tokens[r]) : 0;
    const Scanned<std::int64_t> scanned = block_scan(cta, kept, shared.scratch);
    if (r < args.rows) args.offsets[r + 1] = done + scanned.before + kept;
    done += scanned.total;
  }
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
