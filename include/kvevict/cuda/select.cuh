// Selection on the device: the best scored rows of every head as ascending indices, exact, ties to the lower index,
// rows per head read on the device. Nothing here waits.
//
// One block per row where there are many rows (select_steps.hpp); several blocks per row where rows are few and long
// (group_steps.hpp). Equal scores give the indices of the CPU selector, bit for bit.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvevict/core/error.hpp"
#include "kvevict/core/index_range.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/group_steps.hpp"
#include "kvevict/cuda/detail/select_steps.hpp"
#include "kvevict/cuda/exec.cuh"

namespace kvevict::inline KVEVICT_ABI::cuda {

namespace kernels {

template <class T>
__global__ void __launch_bounds__(1024) select_kernel(const __grid_constant__ SelectArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  DeviceCta cta;
  auto* shared = reinterpret_cast<SelectShared*>(shared_memory);
  select_row(cta, args, *shared, reinterpret_cast<std::int32_t*>(shared + 1));
}

// The steps without a type of their own are templates too, so that a header may define them.
template <class Args>
__global__ void __launch_bounds__(512) digit_kernel(const __grid_constant__ Args args, int pass) {
  __shared__ GroupShared shared;
  DeviceCta cta;
  count_digits(cta, args, pass, shared);
}
template <class Args>
__global__ void __launch_bounds__(512) count_kernel(const __grid_constant__ Args args) {
  __shared__ GroupShared shared;
  DeviceCta cta;
  count_chunk(cta, args, shared);
}
template <class Args>
__global__ void __launch_bounds__(512, 3) write_kernel(const __grid_constant__ Args args) {
  __shared__ GroupShared shared;
  DeviceCta cta;
  write_chunk(cta, args, shared);
}
template <class Args>
__global__ void __launch_bounds__(256)
    range_kernel(const __grid_constant__ Args args, IndexRange* ranges, std::uint32_t* want) {
  DeviceCta cta;
  range_rows(cta, args, ranges, want);
}
template <class Args>
__global__ void __launch_bounds__(1024) offset_kernel(const __grid_constant__ Args args) {
  __shared__ OffsetShared shared;
  DeviceCta cta;
  scan_offsets(cta, args, shared);
}

// One block per row.
template <class T>
void launch_select(const cuda_exec& exec, SelectArgs<T> args, index_t rows, index_t longest) {
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const bool pairs = rows > processors;  // two blocks per processor: one loads while the other counts
  const int all = pairs ? device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 - 1024
                        : device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const auto room = static_cast<std::int64_t>(all) - static_cast<std::int64_t>(sizeof(SelectShared));
  args.staged = static_cast<index_t>(std::clamp<std::int64_t>(room / 4, 0, longest));
  const std::size_t bytes = sizeof(SelectShared) + static_cast<std::size_t>(args.staged) * sizeof(std::int32_t);
  const int most_threads = pairs ? 512 : 1024;
  const int threads = std::clamp(static_cast<int>(round_up<std::int64_t>(longest / 8 + 1, 32)), 64, most_threads);
  allow_shared(select_kernel<T>, bytes);
  select_kernel<T><<<static_cast<unsigned>(rows), threads, bytes, exec.stream>>>(args);
  check_launch("select");
}

// Memory and launches that the group steps share. The caller sets args.ranges and args.want.
class GroupRun {
 public:
  GroupRun(const cuda_exec& exec, const float* scores, std::int64_t row_stride, index_t rows, index_t group_rows,
           index_t longest, unsigned long long* error, std::int64_t first_row)
      : exec_(exec) {
    if (rows > 65535) fail_argument("select: ", rows, " rows that blocks share; at most 65535 are possible");
    if (static_cast<std::int64_t>(group_rows) * longest > 0xffffffffll)
      fail_argument("select: a group of ", group_rows, " rows of ", longest, " tokens; at most 2^32 - 1 are ranked");
    const std::int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
    const std::int64_t each = ceil_div(std::int64_t{longest} * rows, 2 * processors);
    args.chunk = static_cast<index_t>(round_up<std::int64_t>(std::clamp<std::int64_t>(each, 2048, 1 << 20), 1024));
    args.chunks = max<index_t>(1, static_cast<index_t>(ceil_div<std::int64_t>(longest, args.chunk)));
    const std::int64_t groups = rows / group_rows;
    states_ = DeviceArray<GroupState>(exec, (FixedDigits::passes + 1) * groups);
    bins_ = DeviceArray<std::uint32_t>(exec, FixedDigits::passes * groups * FixedDigits::bins);
    counts_ = DeviceArray<ChunkCounts>(exec, std::int64_t{rows} * args.chunks);
    check(cudaMemsetAsync(bins_.data(), 0, bins_.bytes(), exec.stream), "select");
    args.scores = scores;
    args.row_stride = row_stride;
    args.rows = rows;
    args.group_rows = group_rows;
    args.states = states_.data();
    args.bins = bins_.data();
    args.counts = counts_.data();
    args.error = error;
    args.first_row = first_row;
  }

  dim3 grid() const { return {static_cast<unsigned>(args.chunks), static_cast<unsigned>(args.rows), 1}; }
  void count() {
    for (int pass = 0; pass < FixedDigits::passes; ++pass)
      digit_kernel<<<grid(), threads, 0, exec_.stream>>>(args, pass);
    count_kernel<<<grid(), threads, 0, exec_.stream>>>(args);
    check_launch("select");
  }

  static constexpr int threads = 512;
  GroupArgs args{};

 private:
  cuda_exec exec_;
  DeviceArray<std::uint32_t> bins_;
  DeviceArray<GroupState> states_;
  DeviceArray<ChunkCounts> counts_;
};

}  // namespace kernels

// Scores of many heads in device memory, and what the selection has to know of them.
struct ScoredRows {
  const float* scores = nullptr;  // [rows][row_stride]
  std::int64_t row_stride = 0;
  index_t rows = 0;                 // (layer, head) pairs
  const index_t* tokens = nullptr;  // [rows]
  index_t longest = 0;              // no row has more tokens; known on the host
  std::int64_t first_row = 0;       // number of the first row in errors: layer * heads
};

// How rows are spread over blocks.
enum class Spread { automatic, row_per_block, row_over_blocks };

// Offsets [rows + 1], from 0, of rows that keep min(budget, tokens) each. All pointers are device memory.
inline void offsets(const cuda_exec& exec, const index_t* tokens, const index_t* budgets, index_t rows,
                    std::int64_t* out) {
  kernels::offset_kernel<<<1, 1024, 0, exec.stream>>>(OffsetArgs{tokens, budgets, rows, out});
  check_launch("offsets");
}

// What a selection works by; the rest of the arguments has no part in it.
inline SelectArgs<float> select_args(const ScoredRows& in, const index_t* budgets, const HeadProtect* protections,
                                     const std::int64_t* offsets, index_t* out, unsigned long long* error) {
  SelectArgs<float> args{};
  args.scores = in.scores;
  args.row_stride = in.row_stride;
  args.tokens = in.tokens;
  args.budgets = budgets;
  args.protections = protections;
  args.offsets = offsets;
  args.out = out;
  args.error = error;
  args.first_row = in.first_row;
  return args;
}

// Writes the rows that stay: budgets [rows] in rows, protected ones included; protections [rows]; offsets [rows + 1];
// out [offsets[rows]]. A NaN sets *error. O(tokens); keys are read from memory once where a row fits into shared
// memory.
inline void select(const cuda_exec& exec, const ScoredRows& in, const index_t* budgets, const HeadProtect* protections,
                   const std::int64_t* offsets, index_t* out, unsigned long long* error,
                   Spread spread = Spread::automatic) {
  if (in.rows == 0) return;
  const SelectArgs<float> args = select_args(in, budgets, protections, offsets, out, error);
  if (spread == Spread::automatic) {
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    const bool few = in.rows < processors / 2 && in.longest > 64 * 1024;
    spread = few ? Spread::row_over_blocks : Spread::row_per_block;
  }
  if (spread == Spread::row_per_block) return kernels::launch_select(exec, args, in.rows, in.longest);
  kernels::GroupRun run(exec, in.scores, in.row_stride, in.rows, 1, in.longest, error, in.first_row);
  DeviceArray<IndexRange> ranges(exec, in.rows);
  DeviceArray<std::uint32_t> want(exec, in.rows);
  run.args.ranges = ranges.data();
  run.args.want = want.data();
  const LongRowArgs all{args, run.args};
  kernels::range_kernel<<<static_cast<unsigned>(ceil_div(in.rows, 256)), 256, 0, exec.stream>>>(all, ranges.data(),
                                                                                                want.data());
  run.count();
  kernels::write_kernel<<<run.grid(), kernels::GroupRun::threads, 0, exec.stream>>>(all);
  check_launch("select");
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
