// The SnapKV window scorer on the device: score_on(cuda_exec, SnapKV, observation, scores). Keys stay in the
// cache's element type; products run on the tensor cores with float32 sums. Two passes over the keys, one where the
// observation carries the log-sum-exp of the window rows, which flash attention returns anyway. Nothing waits.
//
// In the observation of a device cache all rows, positions (of the window too) and extras.lse are device memory; the
// arrays of rows per head are host memory. Scores agree with the host within 1e-5 of the layer's largest.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/tables.cuh"
#include "kvevict/cuda/detail/window_steps.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/check_scoring.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::inline KVEVICT_ABI {
namespace cuda::kernels {

template <class T>
__global__ void __launch_bounds__(128) visible_kernel(const __grid_constant__ WindowArgs<T> args) {
  DeviceCta cta;
  count_visible(cta, args);
}
template <class T, int Blocks>
__global__ void __launch_bounds__(WalkShape::threads, 2) lse_kernel(const __grid_constant__ WindowArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  DeviceCta cta;
  sum_exponentials<T, Blocks, tiles_for<T, Blocks>>(cta, args, shared_memory);
}
template <class T>
__global__ void __launch_bounds__(256) join_kernel(const __grid_constant__ WindowArgs<T> args) {
  DeviceCta cta;
  join_exponentials(cta, args);
}
template <class T, int Blocks>
__global__ void __launch_bounds__(WalkShape::threads, 2) window_kernel(const __grid_constant__ WindowArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  DeviceCta cta;
  score_window<T, Blocks, tiles_for<T, Blocks>>(cta, args, shared_memory);
}
template <class T>
__global__ void __launch_bounds__(128) fill_kernel(const __grid_constant__ WindowArgs<T> args, index_t sinks) {
  DeviceCta cta;
  fill_protected(cta, args, sinks);
}

// Row tiles that are staged at once: all of them where they fit beside the rest.
template <class T, class Layout>
void choose_chunk(const WalkShape& shape, WindowArgs<T>& args, int blocks, Layout&& layout) {
  const int tiles = row_tiles_of(args, args.window);
  args.chunk_tiles = 1;
  const std::size_t one = layout(args).bytes(), each = static_cast<std::size_t>(tile_pieces(blocks, 1)) * sizeof(Piece);
  const auto room = static_cast<std::size_t>(shape.shared_bytes);
  if (one > room)
    fail_argument(score::SnapKV::name, ": window=", args.window, " with ", args.group, " query heads per head needs ",
                  one, " bytes of shared memory; ", room, " are there");
  args.chunk_tiles = static_cast<int>(std::min<std::size_t>(1 + (room - one) / each, static_cast<std::size_t>(tiles)));
}

template <class T, int Blocks>
void run_window(const cuda_exec& exec, WindowArgs<T> args, index_t longest, index_t sinks, bool raise) {
  constexpr int tiles = tiles_for<T, Blocks>, tokens_per_step = WalkShape::warps * tiles * tile_tokens;
  const WalkShape shape;
  const auto heads = static_cast<unsigned>(args.heads);
  args.steps = shape.steps(longest, args.heads, tokens_per_step);
  args.splits = static_cast<index_t>(ceil_div<std::int64_t>(longest, std::int64_t{args.steps} * tokens_per_step));
  const std::int64_t rows = std::int64_t{args.heads} * args.group * args.window;
  DeviceArray<index_t> visible(exec, std::int64_t{args.heads} * args.window);
  args.visible = visible.data();
  visible_kernel<T><<<heads, 128, 0, exec.stream>>>(args);
  DeviceArray<LogSum> partial;
  DeviceArray<float> row_lse;
  if (!args.lse) {
    partial = DeviceArray<LogSum>(exec, rows * args.splits);
    row_lse = DeviceArray<float>(exec, rows);
    args.partial = partial.data();
    args.row_lse = row_lse.data();
    choose_chunk(shape, args, Blocks, [](const auto& a) { return lse_shared(a, Blocks, WalkShape::warps); });
    const std::size_t bytes = lse_shared(args, Blocks, WalkShape::warps).bytes();
    allow_shared(lse_kernel<T, Blocks>, bytes);
    lse_kernel<T, Blocks>
        <<<dim3(static_cast<unsigned>(args.splits), heads), WalkShape::threads, bytes, exec.stream>>>(args);
    join_kernel<T><<<heads, 256, 0, exec.stream>>>(args);
  }
  DeviceArray<std::int32_t> largest;
  if (raise) {
    largest = DeviceArray<std::int32_t>(exec, 1);
    args.largest = largest.data();
    check(cudaMemsetAsync(largest.data(), 0, sizeof(std::int32_t), exec.stream), score::SnapKV::name);
  }
  // A block has to score more than it reads twice for pooling.
  while (args.steps * tokens_per_step < 8 * args.halo() + tokens_per_step) ++args.steps;
  choose_chunk(shape, args, Blocks, [](const auto& a) { return score_shared(a, Blocks, tiles, WalkShape::warps); });
  const std::size_t bytes = score_shared(args, Blocks, tiles, WalkShape::warps).bytes();
  allow_shared(window_kernel<T, Blocks>, bytes);
  const auto parts = static_cast<unsigned>(
      ceil_div<std::int64_t>(longest, std::int64_t{args.steps} * tokens_per_step - 2 * args.halo()));
  window_kernel<T, Blocks><<<dim3(parts, heads), WalkShape::threads, bytes, exec.stream>>>(args);
  if (raise)
    fill_kernel<T><<<dim3(1, args.group_op == GroupReduction::none ? heads * static_cast<unsigned>(args.group) : heads),
                     128, 0, exec.stream>>>(args, sinks);
  check_launch(score::SnapKV::name);
}

}  // namespace cuda::kernels

// out: device memory, [kv_heads, or q_heads with group=none][at least the most tokens of a head].
template <class T>
void score_on(const cuda_exec& exec, const score::SnapKV& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  using namespace cuda;
  check_scoring(scorer, o, out);
  const index_t longest = o.most_tokens();
  if (longest == 0) return;
  if (longest > 1 << 30) fail_argument(score::SnapKV::name, ": ", longest, " tokens; at most 2^30 are possible");
  std::vector<const index_t*> positions;
  for (const auto& p : o.positions) positions.push_back(p.data());
  const WholeRows<T> whole_keys(exec, o.keys), whole_queries(exec, o.window_queries);
  Tables tables;
  const std::size_t keys = tables.add(whole_keys.rows()), queries = tables.add(whole_queries.rows()),
                    key_positions = tables.add(std::span<const index_t*const>(positions));
  tables.send(exec);
  WindowArgs<T> args{};
  args.keys = tables.at<Rows<const T>>(keys);
  args.queries = tables.at<Rows<const T>>(queries);
  args.key_positions = positions.empty() ? nullptr : tables.at<const index_t*>(key_positions);
  args.query_positions = o.window_positions.data();
  args.heads = o.shape.kv_heads;
  args.group = o.shape.group();
  args.window = scorer.window;
  args.recorded = static_cast<index_t>(o.window_positions.size());
  args.scale = o.softmax_scale * log2_e;
  args.lse = o.extras.lse.empty() ? nullptr : o.extras.lse.data();
  args.out = out.data;
  args.out_stride = out.row_stride;
  args.mean_rows = scorer.rows == RowReduction::mean;
  args.group_first = scorer.order == PoolOrder::group_then_pool;
  args.group_op = scorer.group;
  args.pool = scorer.pool;
  args.fill = minus_infinity();
  kernels::with_blocks(score::SnapKV::name, blocks_of<T>(o.shape.head_dim_k), [&](auto blocks) {
    kernels::run_window<T, decltype(blocks)::value>(exec, args, longest, scorer.sinks,
                                                    scorer.protect == ProtectShare::score);
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
