// Selection of one row by one thread block: the k best scores of a row as ascending indices, exact, ties to the lower
// index, protected ranges around them. Keys stay in shared memory, as many as fit; the rest is read again from global
// memory (the L2 cache), so that any length works.
//
// Steps: keys with their smallest and largest; radix digits relative to that range until one key is left or a bin is
// taken whole; each warp counts what it will write in its part of the row; each warp writes its part.
#pragma once
#include <cstdint>

#include "kvevict/core/half.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// All pointers are device memory.
template <class T>
struct SelectArgs {
  const T* scores;  // [rows][row_stride]
  std::int64_t row_stride;
  const index_t* tokens;           // [rows]
  const index_t* budgets;          // [rows]; rows to keep, protected ones included
  const HeadProtect* protections;  // [rows]
  bool reserving;                  // everything that is asked for is protected, and what is reserved besides is ranked
  const std::int64_t* offsets;     // [rows + 1]; where the rows' indices begin; null: nothing is written
  index_t* out;                    // [offsets[rows]]
  // Threshold of each row, [rows], and how many entries equal it beyond those taken; may be null.
  std::int32_t* cut_keys;
  index_t* ties_left;
  unsigned long long* error;
  std::int64_t first_row;  // added to row numbers in the error word
  index_t staged;          // keys that fit into shared memory
};

struct SelectShared {
  BlockScratch scratch;
  std::int32_t lo[most_warps], hi[most_warps];
  std::uint32_t digit, need;
  std::uint32_t bins[KeyRange::bins];
};

// What is ranked in one row, and how much of it is taken.
struct RowTask {
  index_t tokens, kept, sinks, newest;
  KVEVICT_HOST_DEVICE index_t ranked() const noexcept { return tokens - sinks - newest; }
  KVEVICT_HOST_DEVICE index_t taken() const noexcept { return kept - sinks - newest; }
};
template <class T>
KVEVICT_HOST_DEVICE RowTask row_task(const SelectArgs<T>& args, std::int64_t row) {
  const index_t tokens = args.tokens[row], kept = min(max<index_t>(0, args.budgets[row]), tokens);
  HeadProtect asked = args.protections[row];
  if (args.reserving) asked.share = ProtectShare::full;
  const ProtectedRows fixed = protect_within(asked, kept);
  return {tokens, kept, fixed.sinks, fixed.newest};
}

// Keys of a row: the first `staged` in shared memory.
template <class T>
struct RowKeys {
  const T* scores;
  std::int32_t* shared;
  index_t staged;
  KVEVICT_DEVICE std::int32_t operator()(index_t i) const {
    return i < staged ? shared[i] : ordered_key(to_float(scores[i]));
  }
};

// Adds one to a bin in shared memory for every lane that has one. Scores pile up in few bins where neighbours are
// equal (max pooling): a warp of one digit adds once.
template <class Cta>
KVEVICT_DEVICE void count_digit(Cta& cta, std::uint32_t* bins, bool in, std::uint32_t digit) {
  const std::uint32_t active = cta.ballot(in);
  if (active == 0) return;
  const std::uint32_t first = cta.shuffle(digit, count_bits((active & (0u - active)) - 1u));  // lowest active lane
  const std::uint32_t same = cta.ballot(in && digit == first);
  if (same == active) {
    if (cta.lane() == 0) cta.add(bins[first], static_cast<std::uint32_t>(count_bits(active)));
  } else if (in) {
    cta.add(bins[digit], 1u);
  }
}

// The bin, from the highest of `count` down, in which the need-th entry lies; shared.digit and shared.need (entries
// still wanted in that bin). 1 <= need <= entries. Returns the entries of the bin.
template <class Cta, class Bin>
KVEVICT_DEVICE void pick_bin(Cta& cta, std::uint32_t count, Bin bin, std::uint32_t need, BlockScratch& scratch,
                             std::uint32_t& digit, std::uint32_t& left) {
  const auto threads = static_cast<std::uint32_t>(cta.threads()), each = ceil_div(count, threads);
  const std::uint32_t first = min(count, static_cast<std::uint32_t>(cta.thread()) * each),
                      last = min(count, first + each);
  std::uint32_t own = 0;
  for (std::uint32_t i = first; i < last; ++i) own += bin(count - 1 - i);
  std::uint32_t above = block_scan(cta, own, scratch).before;
  for (std::uint32_t i = first; i < last; ++i) {
    const std::uint32_t here = bin(count - 1 - i);
    if (above < need && need - above <= here) {  // one thread, one bin
      digit = count - 1 - i;
      left = need - above;
    }
    above += here;
  }
  cta.sync();
}

// The cut of keys(0 .. n): 1 <= need <= n, all within range.
template <class Cta, class Keys>
KVEVICT_DEVICE Threshold find_cut(Cta& cta, const Keys& keys, index_t n, KeyRange range, index_t need,
                                  SelectShared& shared) {
  while (range.width() != 0) {
    const int shift = range.shift();
    const std::uint32_t bins = (range.width() >> shift) + 1;
    for (auto i = static_cast<std::uint32_t>(cta.thread()); i < bins; i += static_cast<std::uint32_t>(cta.threads()))
      shared.bins[i] = 0;
    cta.sync();
    for (std::int64_t base = cta.warp() * warp_size; base < n; base += cta.threads()) {  // whole warps reach the votes
      const std::int64_t i = base + cta.lane();
      const std::int32_t key = i < n ? keys(static_cast<index_t>(i)) : 0;
      const bool in = i < n && range.holds(key);
      count_digit(cta, shared.bins, in, in ? range.digit(key, shift) : 0u);
    }
    cta.sync();
    pick_bin(
        cta, bins, [&](std::uint32_t b) { return shared.bins[b]; }, static_cast<std::uint32_t>(need), shared.scratch,
        shared.digit, shared.need);
    const std::uint32_t digit = shared.digit, here = shared.bins[digit];
    need = static_cast<index_t>(shared.need);
    range = range.of_digit(digit, shift);
    cta.sync();
    if (here == static_cast<std::uint32_t>(need)) return {range.lo - 1, 0};  // the bin is taken whole
  }
  return {range.lo, need};
}

// A part [begin, end) of a row, cut over the warps: begin and end of this warp's share, multiples of 32 long.
struct WarpShare {
  index_t begin, end;
};
template <class Cta>
KVEVICT_DEVICE WarpShare warp_share(const Cta& cta, index_t begin, index_t end) {
  const auto count = static_cast<std::int64_t>(end) - begin;
  const std::int64_t each = round_up(ceil_div<std::int64_t>(count, cta.warps()), std::int64_t{warp_size});
  const std::int64_t first = min(count, each * cta.warp()), last = min(count, first + each);
  return {static_cast<index_t>(begin + first), static_cast<index_t>(begin + last)};
}

// Entries of a warp's share above the cut and equal to it; the same in every lane.
struct Counts {
  std::uint32_t above, equal;
};
template <class Cta, class Keys>
KVEVICT_DEVICE Counts count_share(Cta& cta, const Keys& keys, WarpShare share, Threshold cut) {
  std::uint32_t above = 0, equal = 0;
  for (std::int64_t i = std::int64_t{share.begin} + cta.lane(); i < share.end; i += warp_size) {
    const std::int32_t key = keys(static_cast<index_t>(i));
    above += cut.above(key);
    equal += cut.equal(key);
  }
  return {warp_sum(cta, above), warp_sum(cta, equal)};
}

// Writes base + i for what a warp takes of its share, ascending, from out[0] on. cut.ties: ties left for this share.
template <class Cta, class Keys>
KVEVICT_DEVICE void write_share(Cta& cta, const Keys& keys, WarpShare share, Threshold cut, index_t base,
                                index_t* out) {
  for (std::int64_t first = share.begin; first < share.end; first += warp_size) {
    const std::int64_t i = first + cta.lane();
    const std::int32_t key = i < share.end ? keys(static_cast<index_t>(i)) : 0;
    const bool equal = i < share.end && cut.equal(key);
    const std::uint32_t equals = cta.ballot(equal), before = lanes_before(cta.lane());
    const bool take = i < share.end && (cut.above(key) || (equal && count_bits(equals & before) < cut.ties));
    const std::uint32_t taken = cta.ballot(take);
    if (take) out[count_bits(taken & before)] = base + static_cast<index_t>(i);
    out += count_bits(taken);
    cut.ties = max(0, cut.ties - count_bits(equals));
  }
}

// Writes first, first + 1, ... to out[0, count).
template <class Cta>
KVEVICT_DEVICE void write_range(const Cta& cta, index_t first, index_t count, index_t* out) {
  for (std::int64_t i = cta.thread(); i < count; i += cta.threads()) out[i] = first + static_cast<index_t>(i);
}

// Reads the n scores of a row: stages keys, flags the first NaN, finds the smallest and the largest key.
template <class Cta, class T>
KVEVICT_DEVICE KeyRange read_row(Cta& cta, const SelectArgs<T>& args, std::int64_t row, index_t sinks, index_t n,
                                 const RowKeys<T>& keys, SelectShared& shared) {
  constexpr int batch = 8;  // loads in flight per thread
  std::int32_t lo = largest_key, hi = -largest_key;
  for (std::int64_t base = cta.thread(); base < n; base += std::int64_t{batch} * cta.threads()) {
    std::int32_t key[batch];
    KVEVICT_UNROLL
    for (int u = 0; u < batch; ++u) {
      const std::int64_t i = base + std::int64_t{u} * cta.threads();
      key[u] = i < n ? ordered_key(to_float(keys.scores[i])) : 0;
    }
    KVEVICT_UNROLL
    for (int u = 0; u < batch; ++u) {
      const std::int64_t i = base + std::int64_t{u} * cta.threads();
      if (i >= n) continue;
      if (is_nan_key(key[u]))
        cta.smallest_global(*args.error,
                            error_word(Fault::nan_score, args.first_row + row, sinks + static_cast<index_t>(i)));
      lo = min(lo, key[u]);
      hi = max(hi, key[u]);
      if (i < keys.staged) keys.shared[i] = key[u];
    }
  }
  lo = warp_min(cta, lo);
  hi = warp_max(cta, hi);
  if (cta.lane() == 0) {
    shared.lo[cta.warp()] = lo;
    shared.hi[cta.warp()] = hi;
  }
  cta.sync();
  lo = warp_min(cta, cta.lane() < cta.warps() ? shared.lo[cta.lane()] : largest_key);
  hi = warp_max(cta, cta.lane() < cta.warps() ? shared.hi[cta.lane()] : -largest_key);
  return {lo, hi};
}

// Kernel A: block x handles row x. staged_keys: [args.staged] in shared memory.
template <class Cta, class T>
KVEVICT_DEVICE void select_row(Cta& cta, const SelectArgs<T>& args, SelectShared& shared, std::int32_t* staged_keys) {
  const std::int64_t row = cta.block_x();
  const RowTask task = row_task(args, row);
  index_t* out = args.offsets ? args.out + args.offsets[row] : nullptr;
  if (task.kept == task.tokens) {  // everything stays; no score is read
    if (out) write_range(cta, 0, task.tokens, out);
    if (args.cut_keys && cta.thread() == 0) {
      args.cut_keys[row] = -largest_key;
      args.ties_left[row] = 0;
    }
    return;
  }
  const index_t n = task.ranked(), taken = task.taken();
  const RowKeys<T> keys{args.scores + row * args.row_stride + task.sinks, staged_keys, min(args.staged, n)};
  const KeyRange range = read_row(cta, args, row, task.sinks, n, keys, shared);
  Threshold cut{largest_key, 0};
  if (taken > 0) cut = find_cut(cta, keys, n, range, taken, shared);

  const WarpShare share = warp_share(cta, 0, n);
  const Counts counts = count_share(cta, keys, share, cut);
  const WarpsBefore before = scan_warps(cta, counts.above, counts.equal, shared.scratch);
  if (args.cut_keys && cta.thread() == 0) {
    args.cut_keys[row] = cut.key;
    args.ties_left[row] = static_cast<index_t>(before.b_total) - cut.ties;
  }
  if (!out) return;
  write_range(cta, 0, task.sinks, out);
  write_range(cta, task.tokens - task.newest, task.newest, out + task.sinks + taken);
  const index_t ties_before = min(cut.ties, static_cast<index_t>(before.b_before));
  write_share(cta, keys, share, {cut.key, cut.ties - ties_before}, task.sinks,
              out + task.sinks + static_cast<index_t>(before.a_before) + ties_before);
}

// Where the rows of each head begin.
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
