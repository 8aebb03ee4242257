// Selection that several thread blocks share: the cut over all candidates of a group of rows. A group is one long row,
// or the heads of a layer for Ada-KV, where only the number of entries of each head among the layer's best is wanted.
//
// One launch per radix digit, grid [chunks of a row][rows]: every block first takes the digit of the launch before from
// its histogram, then counts its own chunk. One more launch counts entries above and equal to the cut, and a last one
// writes indices (long rows) or rows per head (Ada-KV). No block waits for another.
#pragma once
#include <cstdint>

#include "kvevict/core/index_range.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"
#include "kvevict/cuda/detail/select_steps.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// Digits found so far and entries still wanted among those that share them.
struct GroupState {
  std::uint32_t prefix, need;
};
struct ChunkCounts {
  index_t above, equal;
};

struct GroupArgs {
  const float* scores;  // [rows][row_stride]
  std::int64_t row_stride;
  index_t rows, group_rows;   // a multiple of each other; a group has fewer than 2^32 candidates
  index_t chunk, chunks;      // entries of a chunk; chunks of the longest row
  const IndexRange* ranges;   // [rows], entries that are ranked
  const std::uint32_t* want;  // [groups]
  // Ada-KV: entries of a row at or above its ceiling are reserved already, but for `extra` that equal it. May be null.
  const std::int32_t* ceilings;  // [rows]
  const index_t* extra;          // [rows]
  GroupState* states;            // [passes + 1][groups]
  std::uint32_t* bins;           // [passes][groups][FixedDigits::bins], zeroed
  ChunkCounts* counts;           // [rows][chunks]
  unsigned long long* error;
  std::int64_t first_row;

  KVEVICT_HOST_DEVICE index_t groups() const noexcept { return rows / group_rows; }
  KVEVICT_HOST_DEVICE GroupState* state(int pass, index_t group) const noexcept {
    return states + std::int64_t{pass} * groups() + group;
  }
  KVEVICT_HOST_DEVICE std::uint32_t* pass_bins(int pass, index_t group) const noexcept {
    return bins + (std::int64_t{pass} * groups() + group) * FixedDigits::bins;
  }
  // A chunk as a range of its row; empty past the row's end.
  KVEVICT_HOST_DEVICE IndexRange chunk_of(index_t row, index_t at) const noexcept {
    const IndexRange all = ranges[row];
    const std::int64_t first = all.begin + std::int64_t{at} * chunk;
    return {static_cast<index_t>(min<std::int64_t>(all.end, first)),
            static_cast<index_t>(min<std::int64_t>(all.end, first + chunk))};
  }
};

struct GroupShared {
  BlockScratch scratch;
  std::uint32_t digit, need;
  std::uint32_t bins[FixedDigits::bins];
};

// Keys of a row below its ceiling; the others rank last and are never wanted.
struct GroupKeys {
  const float* scores;
  std::int32_t ceiling;
  bool has_ceiling;
  KVEVICT_DEVICE std::int32_t operator()(index_t i) const { return ordered_key(scores[i]); }
  KVEVICT_DEVICE bool open(std::int32_t key) const { return !has_ceiling || key < ceiling; }
};
KVEVICT_DEVICE GroupKeys group_keys(const GroupArgs& args, index_t row) {
  return {args.scores + row * args.row_stride, args.ceilings ? args.ceilings[row] : 0, args.ceilings != nullptr};
}

// The digits before `pass`, from the histogram of the pass before. The group's first block leaves them for the next.
template <class Cta>
KVEVICT_DEVICE GroupState enter_pass(Cta& cta, const GroupArgs& args, int pass, GroupShared& shared) {
  const index_t row = cta.block_y(), group = row / args.group_rows;
  GroupState state{0, 0};
  if (pass == 0) {
    state.need = args.want[group];
  } else {
    state = *args.state(pass - 1, group);
    if (state.need > 0) {
      const std::uint32_t* bins = args.pass_bins(pass - 1, group);
      pick_bin(
          cta, 1u << FixedDigits::bits(pass - 1), [&](std::uint32_t b) { return bins[b]; }, state.need, shared.scratch,
          shared.digit, shared.need);
      state.prefix |= shared.digit << FixedDigits::shift(pass - 1);
      state.need = shared.need;
    }
  }
  if (cta.block_x() == 0 && row % args.group_rows == 0 && cta.thread() == 0) *args.state(pass, group) = state;
  return state;
}

// Launch `pass`, 0 to 2: counts the digits of a chunk.
template <class Cta>
KVEVICT_DEVICE void count_digits(Cta& cta, const GroupArgs& args, int pass, GroupShared& shared) {
  const index_t row = cta.block_y(), group = row / args.group_rows;
  const GroupState state = enter_pass(cta, args, pass, shared);
  const IndexRange range = args.chunk_of(row, cta.block_x());
  const GroupKeys keys = group_keys(args, row);
  std::uint32_t* bins = args.pass_bins(pass, group);
  if (state.need == 0 && pass > 0) return;
  if (args.extra && cta.block_x() == 0 && cta.thread() == 0 && args.extra[row] > 0) {
    const std::uint32_t bits = FixedDigits::bits_of(keys.ceiling);
    if (FixedDigits::candidate(bits, state.prefix, pass))
      cta.add_global(bins[FixedDigits::digit(bits, pass)], static_cast<std::uint32_t>(args.extra[row]));
  }
  if (range.begin >= range.end) return;
  for (int i = cta.thread(); i < FixedDigits::bins; i += cta.threads()) shared.bins[i] = 0;
  cta.sync();
  for (std::int64_t base = std::int64_t{range.begin} + cta.warp() * warp_size; base < range.end;
       base += cta.threads()) {
    const std::int64_t i = base + cta.lane();
    const std::int32_t key = i < range.end ? keys(static_cast<index_t>(i)) : 0;
    if (pass == 0 && i < range.end && is_nan_key(key))
      cta.smallest_global(*args.error, error_word(Fault::nan_score, args.first_row + row, static_cast<index_t>(i)));
    const std::uint32_t bits = FixedDigits::bits_of(key);
    const bool in = i < range.end && keys.open(key) && FixedDigits::candidate(bits, state.prefix, pass);
    count_digit(cta, shared.bins, in, in ? FixedDigits::digit(bits, pass) : 0u);
  }
  cta.sync();
  for (int i = cta.thread(); i < FixedDigits::bins; i += cta.threads())
    if (shared.bins[i] != 0) cta.add_global(bins[i], shared.bins[i]);
}

KVEVICT_HOST_DEVICE inline Threshold cut_of(GroupState state) noexcept {
  if (state.need == 0) return {largest_key, 0};
  return {FixedDigits::key_of(state.prefix), static_cast<index_t>(min(state.need, 0x7fffffffu))};
}

// Launch 3: entries of a chunk above and equal to the cut, below the ceiling.
template <class Cta>
KVEVICT_DEVICE void count_chunk(Cta& cta, const GroupArgs& args, GroupShared& shared) {
  const index_t row = cta.block_y();
  const Threshold cut = cut_of(enter_pass(cta, args, FixedDigits::passes, shared));
  const IndexRange range = args.chunk_of(row, cta.block_x());
  const GroupKeys keys = group_keys(args, row);
  std::uint32_t above = 0, equal = 0;
  for (std::int64_t i = std::int64_t{range.begin} + cta.thread(); i < range.end; i += cta.threads()) {
    const std::int32_t key = keys(static_cast<index_t>(i));
    above += keys.open(key) && cut.above(key);
    equal += keys.open(key) && cut.equal(key);
  }
  const WarpsBefore sums = scan_warps(cta, warp_sum(cta, above), warp_sum(cta, equal), shared.scratch);
  if (cta.thread() == 0)
    args.counts[std::int64_t{row} * args.chunks + cta.block_x()] = {static_cast<index_t>(sums.a_total),
                                                                    static_cast<index_t>(sums.b_total)};
}

// Last launch for long rows (group_rows = 1), same grid: writes the indices of a chunk.
struct LongRowArgs {
  SelectArgs<float> select;
  GroupArgs group;
};
template <class Cta>
KVEVICT_DEVICE void write_chunk(Cta& cta, const LongRowArgs& args, GroupShared& shared) {
  const index_t row = cta.block_y(), at = cta.block_x();
  const RowTask task = row_task(args.select, row);
  index_t* out = args.select.out + args.select.offsets[row];
  if (task.kept == task.tokens) {
    const std::int64_t first = std::int64_t{at} * args.group.chunk;
    const auto begin = static_cast<index_t>(min<std::int64_t>(task.tokens, first));
    const auto end = static_cast<index_t>(min<std::int64_t>(task.tokens, first + args.group.chunk));
    write_range(cta, begin, end - begin, out + begin);
    return;
  }
  if (at == 0) {
    write_range(cta, 0, task.sinks, out);
    write_range(cta, task.tokens - task.newest, task.newest, out + task.kept - task.newest);
  }
  const IndexRange range = args.group.chunk_of(row, at);
  if (range.begin >= range.end) return;
  const Threshold cut = cut_of(*args.group.state(FixedDigits::passes, row));
  const ChunkCounts* counts = args.group.counts + std::int64_t{row} * args.group.chunks;
  std::uint32_t above = 0, equal = 0;
  for (index_t c = cta.thread(); c < at; c += cta.threads()) {
    above += static_cast<std::uint32_t>(counts[c].above);
    equal += static_cast<std::uint32_t>(counts[c].equal);
  }
  const WarpsBefore chunks = scan_warps(cta, warp_sum(cta, above), warp_sum(cta, equal), shared.scratch);
  const GroupKeys keys = group_keys(args.group, row);
  const WarpShare share = warp_share(cta, range.begin, range.end);
  const Counts own = count_share(cta, keys, share, cut);
  const WarpsBefore warps = scan_warps(cta, own.above, own.equal, shared.scratch);
  const index_t ties_before = min(cut.ties, static_cast<index_t>(chunks.b_total + warps.b_before));
  write_share(cta, keys, share, {cut.key, cut.ties - ties_before}, 0,
              out + task.sinks + static_cast<index_t>(chunks.a_total + warps.a_before) + ties_before);
}

// First launch for long rows: what is ranked, and how much of it. Thread i of block x handles row x * threads + i.
template <class Cta>
KVEVICT_DEVICE void range_rows(Cta& cta, const LongRowArgs& args, IndexRange* ranges, std::uint32_t* want) {
  const std::int64_t row = std::int64_t{cta.block_x()} * cta.threads() + cta.thread();
  if (row >= args.group.rows) return;
  const RowTask task = row_task(args.select, row);
  const bool all = task.kept == task.tokens;
  ranges[row] = all ? IndexRange{0, 0} : IndexRange{task.sinks, task.tokens - task.newest};
  want[row] = all ? 0u : static_cast<std::uint32_t>(task.taken());
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
