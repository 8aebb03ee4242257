// Selection by a segmented sort of CUB: the oracle of the device tests and a slow path that shares nothing with
// select.cuh but the keys. 64 bytes and more move per score, against 4 in select.cuh. Heavy to compile, hence alone.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cub/device/device_segmented_sort.cuh>
#include <cub/version.cuh>

#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/select_steps.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/cuda/select.cuh"

namespace kvevict::inline KVEVICT_ABI::cuda {

// cub::DeviceBatchedTopK takes segments with a k each from the device; its deterministic form with ties to the smaller
// index needs CCCL 3.5 and SM90. Where it is there, sort_rows below is the place that it replaces.
#if defined(CCCL_VERSION) && CCCL_VERSION >= 3005000
inline constexpr bool has_batched_topk = true;
#else
inline constexpr bool has_batched_topk = false;
#endif

namespace kernels {

// Ranked entries of a row: keys that ascend where scores descend, and their tokens. Block (x, y) = (part, row).
template <class Args>
__global__ void __launch_bounds__(256)
    sort_fill_kernel(const __grid_constant__ Args args, std::uint32_t* keys, index_t* tokens, std::int64_t* begin,
                     std::int64_t* end, std::int64_t* taken_end) {
  const std::int64_t row = blockIdx.y, base = row * args.row_stride;
  const RowTask task = row_task(args, row);
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i == 0) {
    begin[row] = base + task.sinks;
    end[row] = base + task.tokens - task.newest;
    taken_end[row] = begin[row] + (task.kept == task.tokens ? 0 : task.taken());
  }
  if (i >= task.tokens) return;
  const std::int32_t key = ordered_key(args.scores[base + i]);
  if (is_nan_key(key) && task.kept != task.tokens && i >= task.sinks && i < task.tokens - task.newest)
    atomicMin(args.error, error_word(Fault::nan_score, args.first_row + row, static_cast<index_t>(i)));
  keys[base + i] = ~FixedDigits::bits_of(key);
  tokens[base + i] = static_cast<index_t>(i);
}
template <class Args>
__global__ void __launch_bounds__(256) sort_write_kernel(const __grid_constant__ Args args, const index_t* tokens) {
  const std::int64_t row = blockIdx.y;
  const RowTask task = row_task(args, row);
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= task.kept) return;
  index_t token = static_cast<index_t>(i);
  if (task.kept != task.tokens && i >= task.sinks) {
    token = i < task.kept - task.newest ? tokens[row * args.row_stride + i]
                                        : task.tokens - static_cast<index_t>(task.kept - i);
  }
  args.out[args.offsets[row] + i] = token;
}

template <class Call>
void with_cub_memory(const cuda_exec& exec, Call&& call) {
  std::size_t bytes = 0;
  check(call(nullptr, bytes), "segmented sort");
  DeviceArray<unsigned char> memory(exec, static_cast<std::int64_t>(bytes) + 1);
  check(call(memory.data(), bytes), "segmented sort");
}

}  // namespace kernels

// As select(), for rows * row_stride scores. Nothing waits.
inline void select_by_sort(const cuda_exec& exec, const ScoredRows& in, const index_t* budgets,
                           const HeadProtect* protections, const std::int64_t* offsets, index_t* out,
                           unsigned long long* error) {
  if (in.rows == 0 || in.longest == 0) return;
  const SelectArgs<float> args = select_args(in, budgets, protections, offsets, out, error);
  const std::int64_t all = in.rows * in.row_stride;
  DeviceArray<std::uint32_t> keys(exec, all), sorted_keys(exec, all);
  DeviceArray<index_t> tokens(exec, all), ranked(exec, all);
  DeviceArray<std::int64_t> begin(exec, in.rows), end(exec, in.rows), taken_end(exec, in.rows);
  const dim3 grid(static_cast<unsigned>(ceil_div<std::int64_t>(in.longest, 256)), static_cast<unsigned>(in.rows));
  kernels::sort_fill_kernel<<<grid, 256, 0, exec.stream>>>(args, keys.data(), tokens.data(), begin.data(), end.data(),
                                                           taken_end.data());
  kernels::with_cub_memory(exec, [&](void* memory, std::size_t& bytes) {
    return cub::DeviceSegmentedSort::StableSortPairs(memory, bytes, keys.data(), sorted_keys.data(), tokens.data(),
                                                     ranked.data(), all, static_cast<std::int64_t>(in.rows),
                                                     begin.data(), end.data(), exec.stream);
  });
  // The best of each row, back in the order of the row.
  kernels::with_cub_memory(exec, [&](void* memory, std::size_t& bytes) {
    return cub::DeviceSegmentedSort::SortKeys(memory, bytes, ranked.data(), tokens.data(), all,
                                              static_cast<std::int64_t>(in.rows), begin.data(), taken_end.data(),
                                              exec.stream);
  });
  kernels::sort_write_kernel<<<grid, 256, 0, exec.stream>>>(args, tokens.data());
  check_launch("select_by_sort");
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
