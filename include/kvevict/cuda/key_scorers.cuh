// Scorers on the device that look at keys alone or at nothing: key norm, KeyDiff, position. Nothing waits.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/simple_steps.hpp"
#include "kvevict/cuda/detail/tables.cuh"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/check_scoring.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"

namespace kvevict::inline KVEVICT_ABI {
namespace cuda {
namespace kernels {

inline constexpr int simple_threads = 256;

template <class T>
__global__ void __launch_bounds__(simple_threads) norm_kernel(const __grid_constant__ KeyArgs<T> args) {
  DeviceCta cta;
  score_norms(cta, args);
}
template <class T>
__global__ void __launch_bounds__(simple_threads) direction_sum_kernel(const __grid_constant__ KeyArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  DeviceCta cta;
  sum_directions(cta, args, reinterpret_cast<float*>(shared_memory));
}
template <class T>
__global__ void __launch_bounds__(simple_threads) direction_kernel(const __grid_constant__ KeyArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  DeviceCta cta;
  score_directions(cta, args, reinterpret_cast<float*>(shared_memory));
}
template <class Args>
__global__ void __launch_bounds__(simple_threads) position_kernel(const __grid_constant__ Args args, index_t parts) {
  DeviceCta cta;
  score_positions(cta, args, parts);
}
template <class Args>
__global__ void __launch_bounds__(128) raise_kernel(const __grid_constant__ Args args, index_t sinks) {
  DeviceCta cta;
  raise_sinks(cta, args, sinks);
}

// What a call of a simple scorer needs besides its kernel: its checks, token counts on the device, and protect=score.
class SimpleRun {
 public:
  template <class S, class T>
  SimpleRun(const cuda_exec& exec, const S& scorer, const LayerObservation<T>& o, const Matrix<float>& out)
      : name_(S::name), exec_(exec), heads_(o.shape.kv_heads) {
    check_scoring(scorer, o, out);
    const Protect protect = scorer.protection();
    if (protect.share == ProtectShare::score) sinks_ = protect.sinks;
    std::vector<index_t> tokens;
    for (const auto& k : o.keys) tokens.push_back(static_cast<index_t>(k.rows));
    tokens_ = uploaded(exec, std::span<const index_t>(tokens));
    args.tokens = tokens_.data();
    args.out = out.data;
    args.stride = out.row_stride;
    if (sinks_ > 0) {
      const std::int32_t none = -infinity_key;
      largest_ = uploaded(exec, std::span(&none, 1));
      args.largest = largest_.data();
    }
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    parts = std::clamp<index_t>(ceil_div<index_t>(4 * processors, heads_), 1,
                                max<index_t>(1, ceil_div<index_t>(o.most_tokens(), simple_threads / row_lanes)));
  }
  dim3 grid() const { return {static_cast<unsigned>(parts), static_cast<unsigned>(heads_), 1}; }
  void finish() {
    if (sinks_ > 0) raise_kernel<<<static_cast<unsigned>(heads_), 128, 0, exec_.stream>>>(args, sinks_);
    check_launch(name_);
  }

  RowArgs args{};
  index_t parts = 1;

 private:
  std::string_view name_;
  cuda_exec exec_;
  index_t heads_, sinks_ = 0;
  DeviceArray<index_t> tokens_;
  DeviceArray<std::int32_t> largest_;
};

template <class T>
void check_row_bytes(std::string_view who, index_t dim) {
  constexpr auto most_bytes = row_lanes * most_row_pieces * sizeof(Piece);
  if (static_cast<std::size_t>(dim) * sizeof(T) > most_bytes)
    fail_argument(who, ": keys of ", dim, " elements; at most ", most_bytes / sizeof(T), " are possible on CUDA");
}

}  // namespace kernels

}  // namespace cuda

// All: out is device memory, [kv_heads][at least the most tokens of a head].
template <class T>
void score_on(const cuda_exec& exec, const score::KNorm& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  using namespace cuda;
  kernels::check_row_bytes<T>(score::KNorm::name, o.shape.head_dim_k);
  kernels::SimpleRun run(exec, scorer, o, out);
  const WholeRows<T> keys(exec, o.keys);
  const DeviceArray<Rows<const T>> table = uploaded(exec, keys.rows());
  const KeyArgs<T> args{table.data(), out.data, out.row_stride, run.args.largest, nullptr, run.parts};
  kernels::norm_kernel<T><<<run.grid(), kernels::simple_threads, 0, exec.stream>>>(args);
  run.finish();
}

template <class T>
void score_on(const cuda_exec& exec, const score::KeyDiff& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  using namespace cuda;
  kernels::check_row_bytes<T>(score::KeyDiff::name, o.shape.head_dim_k);
  kernels::SimpleRun run(exec, scorer, o, out);
  const WholeRows<T> keys(exec, o.keys);
  const DeviceArray<Rows<const T>> table = uploaded(exec, keys.rows());
  const auto dim = static_cast<std::size_t>(o.shape.head_dim_k);
  DeviceArray<float> partial(exec, std::int64_t{o.shape.kv_heads} * run.parts * o.shape.head_dim_k);
  const KeyArgs<T> args{table.data(), out.data, out.row_stride, run.args.largest, partial.data(), run.parts};
  const std::size_t bytes = kernels::simple_threads / row_lanes * dim * sizeof(float);
  kernels::allow_shared(kernels::direction_sum_kernel<T>, bytes);
  kernels::direction_sum_kernel<T><<<run.grid(), kernels::simple_threads, bytes, exec.stream>>>(args);
  kernels::direction_kernel<T><<<run.grid(), kernels::simple_threads, dim * sizeof(float), exec.stream>>>(args);
  run.finish();
}

template <class T>
void score_on(const cuda_exec& exec, const score::Position& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  using namespace cuda;
  kernels::SimpleRun run(exec, scorer, o, out);
  kernels::position_kernel<<<run.grid(), kernels::simple_threads, 0, exec.stream>>>(run.args, run.parts);
  run.finish();
}

}  // namespace kvevict::inline KVEVICT_ABI
