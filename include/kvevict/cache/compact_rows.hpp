// Keeping some rows of a buffer, in ascending order: in place, or gathered into memory of the caller.
// In place needs no memory: as the kept indices ascend, no row ever overtakes its source. Out of place pays only into
// memory that was touched before (a fresh allocation costs four to five times as much in page faults), so the
// destination is always the caller's. Random rows arrive at a fraction of the speed of memory unless they are
// prefetched.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// body(first, count) for each maximal run of consecutive indices. O(keep).
template <class Body>
void for_each_run(std::span<const index_t> keep, Body&& body) {
  for (std::size_t i = 0; i < keep.size();) {
    std::size_t end = i + 1;
    while (end < keep.size() && keep[end] == keep[end - 1] + 1) ++end;
    body(keep[i], static_cast<index_t>(end - i));
    i = end;
  }
}

namespace detail {

// The widest store that bypasses the cache; one vector at a time, `to` aligned to `width`.
#if defined(__AVX512F__)
struct StreamStore {
  static constexpr std::size_t width = 64;
  static void copy(std::byte* to, const std::byte* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void fence() { _mm_sfence(); }
};
#elif defined(__AVX__)
struct StreamStore {
  static constexpr std::size_t width = 32;
  static void copy(std::byte* to, const std::byte* from) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void fence() { _mm_sfence(); }
};
#elif defined(__SSE2__)
struct StreamStore {
  static constexpr std::size_t width = 16;
  static void copy(std::byte* to, const std::byte* from) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void fence() { _mm_sfence(); }
};
#else
struct StreamStore {  // no such store: an ordinary one
  static constexpr std::size_t width = 16;
  static void copy(std::byte* to, const std::byte* from) { std::memcpy(to, from, width); }
  static void fence() {}
};
#endif

// Ascending copy of `bytes` bytes; `to` may overlap `from` from below. Ordinary stores up to the first aligned vector
// and behind the last one.
inline void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t width = StreamStore::width;
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % width;
  if (misaligned != 0) {
    const std::size_t head = std::min(bytes, width - misaligned);
    std::memmove(to, from, head);
    to += head;
    from += head;
    bytes -= head;
  }
  for (; bytes >= width; to += width, from += width, bytes -= width) StreamStore::copy(to, from);
  if (bytes != 0) std::memmove(to, from, bytes);
}

// Kept rows lie at random as far as the processor can tell, so they are asked for well ahead of being copied: rows up
// to this size (longer ones stream by themselves), so many rows ahead.
inline constexpr std::size_t prefetch_below_bytes = 2048, prefetch_rows = 32;

// Into the second level: the first one has too few outstanding misses to keep memory busy.
inline void prefetch_row(const std::byte* row, std::size_t row_bytes) {
  for (std::size_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
}

// copy(to, from, bytes) for each run of consecutive kept rows.
template <class Copy>
void move_rows(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep,
               Copy&& copy) {
  const auto row = [&](std::size_t i) { return from + static_cast<std::size_t>(keep[i]) * row_bytes; };
  const std::size_t asked = row_bytes < prefetch_below_bytes ? keep.size() : 0;
  for (std::size_t i = 0; i < std::min(asked, prefetch_rows); ++i) prefetch_row(row(i), row_bytes);
  for (std::size_t i = 0; i < keep.size();) {
    const std::size_t first = i;
    do {
      if (i + prefetch_rows < asked) prefetch_row(row(i + prefetch_rows), row_bytes);
      ++i;
    } while (i < keep.size() && keep[i] == keep[i - 1] + 1);
    const std::size_t bytes = (i - first) * row_bytes;
    if (row(first) != to) copy(to, row(first), bytes);
    to += bytes;
  }
}

}  // namespace detail

// Moves the rows keep[i] of `from` to row i of `to`, row_bytes bytes each (any size, any alignment). keep is ascending
// and unique; `to` is at or below `from`, or the two do not overlap at all. O(keep * row_bytes); rows that are in place
// already are not touched.
inline void compact_rows(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep) {
  detail::move_rows(to, from, row_bytes, keep,
                    [](std::byte* t, const std::byte* f, std::size_t bytes) { std::memmove(t, f, bytes); });
}

// The same by stores that bypass the cache, for a destination that nobody reads soon: what is in the caches stays
// there. The rows are visible to other threads as soon as the call returns.
inline void stream_rows(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep) {
  detail::move_rows(to, from, row_bytes, keep, detail::stream_bytes);
  detail::StreamStore::fence();
}

// The same in place for rows of one head of any layout, dense or in blocks: row keep[i] of `all` becomes row i. This is
// what an engine calls with the rows that a LayerPlan keeps, once for keys and once for values. The elements of a row
// lie together (col_stride 1); std::invalid_argument otherwise.
template <class T>
requires(!std::is_const_v<T>) void compact_rows(const Rows<T>& all, std::span<const index_t> keep) {
  if (all.col_stride != 1)
    fail_argument("compact_rows: elements of a row lie ", all.col_stride, " apart; rows of adjacent elements move");
  const auto row_bytes = static_cast<std::size_t>(all.cols) * sizeof(T);
  if (all.blocks == nullptr && all.row_stride == all.cols) {
    auto* rows = reinterpret_cast<std::byte*>(all.data);
    return compact_rows(rows, rows, row_bytes, keep);
  }
  // Rows that follow each other in memory move together: none where rows are apart, else up to the end of a block.
  const bool adjacent = all.row_stride == all.cols;
  index_t to = 0;
  for_each_run(keep, [&](index_t from, index_t count) {
    if (from == to) {
      to += count;
      return;
    }
    while (count > 0) {
      const index_t step =
          adjacent ? std::min({count, all.block_rows - from % all.block_rows, all.block_rows - to % all.block_rows})
                   : 1;
      std::memmove(all.row(to), all.row(from), static_cast<std::size_t>(step) * row_bytes);
      from += step;
      to += step;
      count -= step;
    }
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
