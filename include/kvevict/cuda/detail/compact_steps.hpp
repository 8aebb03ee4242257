// Moving the rows that stay, bit for bit. In place: a block owns a slice of the columns of one head and walks the kept
// rows upwards. Kept rows ascend, so a row never moves up, and what a tile overwrites lies before everything that later
// tiles read; within a tile a barrier separates reading from writing. Into new memory (gather): any order.
#pragma once
#include <cstdint>

#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/rules.hpp"
#include "kvevict/cuda/detail/tile.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

// Where the rows of one layer's heads lie: one after the other in areas of `area_rows` rows, in areas that begin at
// first[head], or in blocks of a pool. Rows are row_bytes long and as far apart.
struct RowStore {
  unsigned char* data;
  std::int64_t row_bytes;
  std::int64_t area_rows;     // rows from one head to the next, where `first` and `blocks` are null
  const std::int64_t* first;  // [heads + 1] or null
  const index_t* blocks;      // [heads][table_stride] or null
  index_t table_stride, block_rows;

  KVEVICT_HOST_DEVICE unsigned char* row(index_t head, std::int64_t r) const noexcept {
    if (blocks) {
      const std::int64_t block = blocks[std::int64_t{head} * table_stride + r / block_rows];
      return data + (block * block_rows + r % block_rows) * row_bytes;
    }
    return data + ((first ? first[head] - first[0] : std::int64_t{head} * area_rows) + r) * row_bytes;
  }
};

// Rows that stay, as HeadRows on the device.
struct KeepRows {
  const std::int64_t* offsets;  // [heads + 1], ascending, not necessarily from 0
  const index_t* rows;          // [listed]
  std::int64_t listed;
  const index_t* tokens;  // [heads]: rows before

  KVEVICT_HOST_DEVICE index_t count(index_t head) const noexcept {
    const std::int64_t first = offsets[head], end = min(offsets[head + 1], listed);
    return first < 0 ? 0 : static_cast<index_t>(min<std::int64_t>(max<std::int64_t>(0, end - first), tokens[head]));
  }
  // The i-th kept row, inside the head whatever the plan says (check_rows tells about bad ones).
  KVEVICT_HOST_DEVICE index_t row(index_t head, std::int64_t i) const noexcept {
    return max<index_t>(0, min<index_t>(rows[offsets[head] + i], tokens[head] - 1));
  }
};

// One thing that moves: keys, values or positions.
struct MovePart {
  RowStore from, to;
  int word_bytes;   // 16, 4 or 2: divides rows and their addresses
  int slice_words;  // in place: words of a row that one block moves; divides 256
  int slices;
};
struct MoveArgs {
  KeepRows keep;
  MovePart part[3];
};

struct alignas(4) Word4 {
  std::uint32_t word;
};
struct alignas(2) Word2 {
  std::uint16_t word;
};

inline constexpr int move_unroll = 4;

// In place, words of one size.
template <class Word, class Cta>
KVEVICT_DEVICE void move_slice(Cta& cta, const KeepRows& keep, const MovePart& part, index_t head, int slice) {
  const index_t count = keep.count(head);
  if (count == keep.tokens[head]) return;  // everything stays where it is
  const int words = static_cast<int>(part.from.row_bytes / part.word_bytes);
  const int column = slice * part.slice_words + cta.thread() % part.slice_words;
  const bool in = column < words;
  const int rows = cta.threads() / part.slice_words, own = cta.thread() / part.slice_words;
  const int tile = rows * move_unroll;
  Word hold[move_unroll] = {}, next[move_unroll] = {};
  const auto load = [&](std::int64_t base, Word(&into)[move_unroll]) {
    KVEVICT_UNROLL
    for (int u = 0; u < move_unroll; ++u) {
      const std::int64_t i = base + u * rows + own;
      if (in && i < count) into[u] = reinterpret_cast<const Word*>(part.from.row(head, keep.row(head, i)))[column];
    }
  };
  load(0, hold);
  for (std::int64_t base = 0; base < count; base += tile) {
    load(base + tile, next);  // its sources lie behind what this tile writes
    cta.sync();               // every source of this tile has been read
    KVEVICT_UNROLL
    for (int u = 0; u < move_unroll; ++u) {
      const std::int64_t i = base + u * rows + own;
      if (in && i < count) reinterpret_cast<Word*>(part.to.row(head, i))[column] = hold[u];
      hold[u] = next[u];
    }
  }
}

// Grid [slices][heads][parts].
template <class Cta>
KVEVICT_DEVICE void compact_in_place(Cta& cta, const MoveArgs& args) {
  const MovePart& part = args.part[cta.block_z()];
  const int slice = cta.block_x();
  if (slice >= part.slices) return;
  const index_t head = cta.block_y();
  if (part.word_bytes == 16) move_slice<Piece>(cta, args.keep, part, head, slice);
  else if (part.word_bytes == 4) move_slice<Word4>(cta, args.keep, part, head, slice);
  else move_slice<Word2>(cta, args.keep, part, head, slice);
}

template <class Word, class Cta>
KVEVICT_DEVICE void gather_words(Cta& cta, const KeepRows& keep, const MovePart& part, index_t head,
                                 std::int64_t blocks) {
  const std::int64_t words = part.from.row_bytes / part.word_bytes, all = words * keep.count(head);
  for (std::int64_t i = std::int64_t{cta.block_x()} * cta.threads() + cta.thread(); i < all;
       i += blocks * cta.threads()) {
    const std::int64_t row = i / words, column = i % words;
    reinterpret_cast<Word*>(part.to.row(head, row))[column] =
        reinterpret_cast<const Word*>(part.from.row(head, keep.row(head, row)))[column];
  }
}

// Grid [blocks][heads][parts]; `from` and `to` do not overlap.
template <class Cta>
KVEVICT_DEVICE void gather_rows(Cta& cta, const MoveArgs& args, index_t blocks) {
  const MovePart& part = args.part[cta.block_z()];
  const index_t head = cta.block_y();
  if (part.word_bytes == 16) gather_words<Piece>(cta, args.keep, part, head, blocks);
  else if (part.word_bytes == 4) gather_words<Word4>(cta, args.keep, part, head, blocks);
  else gather_words<Word2>(cta, args.keep, part, head, blocks);
}

// Flags the first entry of a head that no plan may hold. Block x = head x; equal_heads: all keep as many as head 0.
template <class Cta>
KVEVICT_DEVICE void check_rows(Cta& cta, const KeepRows& keep, bool equal_heads, std::int64_t first_row,
                               unsigned long long* error) {
  const index_t head = cta.block_x(), tokens = keep.tokens[head];
  const std::int64_t begin = keep.offsets[head], count = keep.offsets[head + 1] - begin;
  const bool uneven = equal_heads && count != keep.offsets[1] - keep.offsets[0];
  if (begin < 0 || count < 0 || count > tokens || begin + count > keep.listed || uneven) {
    if (cta.thread() == 0) cta.smallest_global(*error, error_word(Fault::bad_plan, first_row + head, 0));
    return;
  }
  for (std::int64_t i = cta.thread(); i < count; i += cta.threads()) {
    const index_t row = keep.rows[begin + i], before = i == 0 ? -1 : keep.rows[begin + i - 1];
    if (row <= before || row >= tokens)
      cta.smallest_global(*error, error_word(Fault::bad_plan, first_row + head, static_cast<index_t>(i)));
  }
}

// After a compaction: rows per head, [heads], and where their areas begin, [heads + 1], each if not null.
template <class Cta>
KVEVICT_DEVICE void set_lengths(Cta& cta, const KeepRows& keep, index_t heads, index_t* tokens, std::int64_t* first,
                                BlockScratch& scratch) {
  std::int64_t done = 0;
  if (first && cta.thread() == 0) first[0] = 0;
  for (index_t base = 0; base < heads; base += cta.threads()) {
    const index_t h = base + cta.thread();
    const index_t count = h < heads ? keep.count(h) : 0;
    const Scanned<std::int64_t> scanned = block_scan(cta, std::int64_t{count}, scratch);
    if (first && h < heads) first[h + 1] = done + scanned.before + count;
    if (tokens && h < heads) tokens[h] = count;
    done += scanned.total;
  }
}

// Block tables: ids of the blocks that a compaction empties, appended to `freed`, by head and then by place. One block.
template <class Cta>
KVEVICT_DEVICE void free_blocks(Cta& cta, const KeepRows& keep, index_t heads, const RowStore& store, index_t* freed,
                                index_t* freed_count, BlockScratch& scratch) {
  std::int64_t done = *freed_count;
  for (index_t base = 0; base < heads; base += cta.threads()) {
    const index_t h = base + cta.thread();
    index_t used = 0, held = 0;
    if (h < heads) {
      used = ceil_div(keep.count(h), store.block_rows);
      held = ceil_div(keep.tokens[h], store.block_rows);
    }
    const Scanned<std::int64_t> scanned = block_scan(cta, std::int64_t{held - used}, scratch);
    for (index_t b = used; b < held; ++b)
      freed[done + scanned.before + b - used] = store.blocks[std::int64_t{h} * store.table_stride + b];
    done += scanned.total;
  }
  cta.sync();  // everybody has read the count
  if (cta.thread() == 0) *freed_count = static_cast<index_t>(done);
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
