// Heads share rows by their scores, on the device: row for row what cpu/split_rows.hpp gives. Nothing here waits.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kvevict/core/index_range.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/split_steps.hpp"
#include "kvevict/cuda/detail/split_tables.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/cuda/select.cuh"

namespace kvevict::inline KVEVICT_ABI::cuda {

namespace kernels {

template <class Args>
__global__ void __launch_bounds__(128)
    share_kernel(const __grid_constant__ Args args, const __grid_constant__ GroupArgs group) {
  __shared__ ShareShared shared;
  DeviceCta cta;
  share_rows(cta, args, group, shared);
}
template <class Args>
__global__ void __launch_bounds__(512) softmax_kernel(const __grid_constant__ Args args) {
  __shared__ SoftmaxShared shared;
  DeviceCta cta;
  log_softmax_row(cta, args, shared);
}

}  // namespace kernels

// The arrays of SplitTables in device memory, for some of its groups.
struct SplitRows {
  const HeadProtect* protections;
  const index_t* reserved;
  const IndexRange* ranges;
  const std::uint32_t* want;
};

// Owns them for all groups.
class DeviceSplit {
 public:
  DeviceSplit() = default;
  DeviceSplit(const cuda_exec& exec, const SplitTables& t)
      : protections_(uploaded(exec, std::span<const HeadProtect>(t.protections))),
        reserved_(uploaded(exec, std::span<const index_t>(t.reserved))),
        ranges_(uploaded(exec, std::span<const IndexRange>(t.ranges))),
        want_(uploaded(exec, std::span<const std::uint32_t>(t.want))) {}

  // From a group on, whose heads begin at `row`.
  SplitRows from(std::int64_t group, std::int64_t row) const {
    return {protections_.data() + row, reserved_.data() + row, ranges_.data() + row, want_.data() + group};
  }

 private:
  DeviceArray<HeadProtect> protections_;
  DeviceArray<index_t> reserved_;
  DeviceArray<IndexRange> ranges_;
  DeviceArray<std::uint32_t> want_;
};

// Rows that stay in each head, budgets [rows], where every `heads` consecutive rows share theirs by score. 6 launches;
// O(tokens).
inline void split_rows(const cuda_exec& exec, const ScoredRows& in, index_t heads, const SplitRows& split,
                       index_t* budgets, unsigned long long* error) {
  if (in.rows == 0) return;
  kernels::GroupRun run(exec, in.scores, in.row_stride, in.rows, heads, in.longest, error, in.first_row);
  DeviceArray<index_t> extra(exec, in.rows);
  DeviceArray<std::int32_t> ceilings(exec, in.rows);
  run.args.ranges = split.ranges;
  run.args.want = split.want;
  run.args.ceilings = ceilings.data();
  run.args.extra = extra.data();
  SelectArgs<float> reserve{};
  reserve.scores = in.scores;
  reserve.row_stride = in.row_stride;
  reserve.tokens = in.tokens;
  reserve.budgets = split.reserved;
  reserve.protections = split.protections;
  reserve.reserving = true;
  reserve.cut_keys = ceilings.data();
  reserve.ties_left = extra.data();
  reserve.error = error;
  reserve.first_row = in.first_row;
  kernels::launch_select(exec, reserve, in.rows, in.longest);
  run.count();
  kernels::share_kernel<<<static_cast<unsigned>(in.rows / heads), 128, 0, exec.stream>>>(
      ShareArgs{heads, split.reserved, budgets}, run.args);
  check_launch("split_rows");
}

// out[r] = log of the softmax of scores[r] over its finite entries, [rows][row_stride] in device memory.
inline void log_softmax(const cuda_exec& exec, const float* scores, std::int64_t row_stride, const index_t* tokens,
                        index_t rows, float* out) {
  if (rows == 0) return;
  kernels::softmax_kernel<<<static_cast<unsigned>(rows), 512, 0, exec.stream>>>(
      SoftmaxArgs{tokens, scores, out, row_stride});
  check_launch("log_softmax");
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
