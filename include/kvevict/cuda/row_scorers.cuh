// Scorers of single rows on the device: everything that has score_row() (score/row_scorer.hpp), `random` and your own
// alike. A thread takes a row; nothing waits.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/simple_steps.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/cuda/key_scorers.cuh"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/score/random.hpp"
#include "kvevict/score/row_scorer.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace cuda::kernels {

template <class T, class Scorer>
__global__ void __launch_bounds__(simple_threads)
    row_scorer_kernel(const __grid_constant__ RowScorerArgs<T> args, const __grid_constant__ Scorer scorer) {
  DeviceCta cta;
  score_rows(cta, args, scorer);
}

}  // namespace cuda::kernels

// out is device memory, [kv_heads][at least the most tokens of a head]. Throws std::invalid_argument for inputs that
// are missing or do not fit.
template <score::ScoresRows S, class T>
void score_on(const cuda_exec& exec, const S& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  using namespace cuda;
  const Needs needs = needs_of(scorer);
  kernels::SimpleRun run(exec, scorer, o, out);
  RowScorerArgs<T> args{.tokens = run.args.tokens,
                        .layer = o.layer,
                        .parts = run.parts,
                        .out = out.data,
                        .stride = out.row_stride,
                        .largest = run.args.largest};
  DeviceArray<Rows<const T>> keys, values;
  DeviceArray<const index_t*> positions;
  if (includes_need(needs, Needs::keys)) args.keys = (keys = uploaded(exec, o.keys)).data();
  if (includes_need(needs, Needs::values)) args.values = (values = uploaded(exec, o.values)).data();
  if (includes_need(needs, Needs::positions)) {
    std::vector<const index_t*> heads;
    for (const auto& p : o.positions) heads.push_back(p.data());
    args.positions = (positions = uploaded(exec, std::span<const index_t* const>(heads))).data();
  }
  kernels::row_scorer_kernel<T, S><<<run.grid(), kernels::simple_threads, 0, exec.stream>>>(args, scorer);
  run.finish();
}

}  // namespace kvevict::inline KVEVICT_ABI
