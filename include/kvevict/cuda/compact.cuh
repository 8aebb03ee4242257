// Compaction on the device: the rows that a plan keeps move to the front of their head, bit for bit, in dense, ragged
// or block-table layouts; positions travel with them (compact_steps.hpp). Nothing here waits.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/compact_steps.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/exec.cuh"

namespace kvevict::inline KVEVICT_ABI::cuda {

namespace kernels {

inline constexpr int move_threads = 256;

template <class Args>
__global__ void __launch_bounds__(move_threads) compact_kernel(const __grid_constant__ Args args) {
  DeviceCta cta;
  compact_in_place(cta, args);
}
template <class Args>
__global__ void __launch_bounds__(move_threads) gather_kernel(const __grid_constant__ Args args, index_t blocks) {
  DeviceCta cta;
  gather_rows(cta, args, blocks);
}
template <class Keep>
__global__ void __launch_bounds__(256) check_kernel(const __grid_constant__ Keep keep, bool equal_heads,
                                                    std::int64_t first_row, unsigned long long* error) {
  DeviceCta cta;
  check_rows(cta, keep, equal_heads, first_row, error);
}
template <class Keep>
__global__ void __launch_bounds__(128)
    length_kernel(const __grid_constant__ Keep keep, index_t heads, index_t* tokens, std::int64_t* first) {
  __shared__ BlockScratch scratch;
  DeviceCta cta;
  set_lengths(cta, keep, heads, tokens, first, scratch);
}
template <class Keep>
__global__ void __launch_bounds__(128)
    free_kernel(const __grid_constant__ Keep keep, index_t heads, const __grid_constant__ RowStore store,
                index_t* freed, index_t* freed_count) {
  __shared__ BlockScratch scratch;
  DeviceCta cta;
  free_blocks(cta, keep, heads, store, freed, freed_count, scratch);
}

// The largest word that divides rows and addresses of both sides.
inline int word_bytes(const RowStore& a, const RowStore& b) {
  const auto bits = reinterpret_cast<std::uintptr_t>(a.data) | reinterpret_cast<std::uintptr_t>(b.data) |
                    static_cast<std::uintptr_t>(a.row_bytes);
  if (bits % 16 == 0) return 16;
  if (bits % 4 == 0) return 4;
  if (bits % 2 == 0) return 2;
  fail_argument("compact: rows of ", a.row_bytes, " bytes; an even number is required");
}

}  // namespace kernels

// One kind of rows that move (keys, values, positions): from and to have equal row_bytes.
struct MoveRows {
  RowStore from, to;
};

// Moves the kept rows of all heads in place; `from` and `to` of each part are the same. Up to three parts.
inline void compact_rows(const cuda_exec& exec, const KeepRows& keep, index_t heads, std::span<const MoveRows> parts) {
  if (heads == 0 || parts.empty()) return;
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  MoveArgs args{};
  args.keep = keep;
  int slices = 1;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    MovePart& part = args.part[i];
    part.from = parts[i].from;
    part.to = parts[i].to;
    part.word_bytes = kernels::word_bytes(part.from, part.to);
    const auto words = static_cast<int>(part.from.row_bytes / part.word_bytes);
    // Slices of 32 bytes, a sector, or wider ones where there are heads enough to fill the device.
    part.slice_words = std::max(1, 32 / part.word_bytes);
    while (part.slice_words < words && part.slice_words < 32 &&
           std::int64_t{heads} * ceil_div(words, 2 * part.slice_words) >= 4 * processors)
      part.slice_words *= 2;
    part.slices = ceil_div(words, part.slice_words);
    slices = std::max(slices, part.slices);
  }
  kernels::compact_kernel<<<dim3(static_cast<unsigned>(slices), static_cast<unsigned>(heads),
                                 static_cast<unsigned>(parts.size())),
                            kernels::move_threads, 0, exec.stream>>>(args);
  check_launch("compact");
}

// Copies the kept rows of all heads to other memory. rows: at most that many rows move in all, to size the launch.
inline void gather_rows(const cuda_exec& exec, const KeepRows& keep, index_t heads, std::int64_t rows,
                        std::span<const MoveRows> parts) {
  if (heads == 0 || parts.empty() || rows == 0) return;
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  MoveArgs args{};
  args.keep = keep;
  std::int64_t words = 1;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    MovePart& part = args.part[i];
    part.from = parts[i].from;
    part.to = parts[i].to;
    part.word_bytes = kernels::word_bytes(part.from, part.to);
    words = std::max(words, rows * part.from.row_bytes / part.word_bytes / heads);
  }
  const auto blocks = static_cast<index_t>(
      std::clamp<std::int64_t>(ceil_div<std::int64_t>(words, 4 * kernels::move_threads), 1, 8 * processors));
  kernels::gather_kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads),
                                static_cast<unsigned>(parts.size())),
                           kernels::move_threads, 0, exec.stream>>>(args, blocks);
  check_launch("compact");
}

// Flags a plan that no cache can carry out (ErrorFlag). first_row: layer * heads.
inline void check_plan_rows(const cuda_exec& exec, const KeepRows& keep, index_t heads, bool equal_heads,
                            std::int64_t first_row, unsigned long long* error) {
  kernels::check_kernel<<<static_cast<unsigned>(heads), 256, 0, exec.stream>>>(keep, equal_heads, first_row, error);
  check_launch("compact");
}

// Rows per head after the compaction, [heads], and where ragged areas begin, [heads + 1]; either may be null, tokens
// may be keep.tokens.
inline void set_lengths(const cuda_exec& exec, const KeepRows& keep, index_t heads, index_t* tokens,
                        std::int64_t* first) {
  kernels::length_kernel<<<1, 128, 0, exec.stream>>>(keep, heads, tokens, first);
  check_launch("compact");
}

// Appends the blocks that the compaction empties to freed[*freed_count], by head and place; before set_lengths.
inline void free_blocks(const cuda_exec& exec, const KeepRows& keep, index_t heads, const RowStore& store,
                        index_t* freed, index_t* freed_count) {
  kernels::free_kernel<<<1, 128, 0, exec.stream>>>(keep, heads, store, freed, freed_count);
  check_launch("compact");
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
