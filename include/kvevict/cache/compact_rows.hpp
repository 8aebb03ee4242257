// Keeping some rows of a buffer, in ascending order: in place, or gathered into memory of the caller.
// In place needs no memory: as the kept indices ascend, no row ever overtakes its source. Out of place pays only into
// memory that was touched before (a fresh allocation costs four to five times as much in page faults), so the
// destination is always the caller's; streaming stores spare reading lines that are about to be overwritten.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kvevict/core/shape.hpp"

namespace kvevict {

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

// Rows that are asked for ahead of being copied: random kept rows defeat the prefetcher of the processor.
inline constexpr std::size_t rows_ahead = 16, prefetched_bytes = 1024;

inline void prefetch_row(const std::byte* row, std::size_t row_bytes) {
#if defined(__GNUC__)
  for (std::size_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(row + b);
#else
  (void)row;
  (void)row_bytes;
#endif
}

template <class Copy>
void move_rows(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep,
               Copy&& copy) {
  std::size_t asked = 0;
  const std::size_t ahead = row_bytes <= prefetched_bytes ? rows_ahead : 0;
  std::size_t done = 0;
  for_each_run(keep, [&](index_t first, index_t count) {
    const std::byte* source = from + static_cast<std::size_t>(first) * row_bytes;
    const std::size_t bytes = static_cast<std::size_t>(count) * row_bytes;
    done += static_cast<std::size_t>(count);
    for (asked = std::max(asked, done); ahead != 0 && asked < std::min(done + ahead, keep.size()); ++asked)
      prefetch_row(from + static_cast<std::size_t>(keep[asked]) * row_bytes, row_bytes);
    if (source != to) copy(to, source, bytes);
    to += bytes;
  });
}

}  // namespace detail

// Moves the rows keep[i] of `from` to row i of `to`, row_bytes bytes each (any size, any alignment). keep is ascending
// and unique; `to` is at or below `from`, or the two do not overlap at all. O(keep * row_bytes); rows that are in place
// already are not touched.
inline void compact_rows(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep) {
  detail::move_rows(to, from, row_bytes, keep,
                    [](std::byte* t, const std::byte* f, std::size_t bytes) { std::memmove(t, f, bytes); });
}

// The same by stores that bypass the cache: faster where more is moved than the caches hold and nobody reads it at
// once. The rows are visible to other threads as soon as the call returns.
inline void stream_rows(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep) {
  detail::move_rows(to, from, row_bytes, keep, detail::stream_bytes);
  detail::StreamStore::fence();
}

}  // namespace kvevict
