// Expected Attention on the host (score/expected.hpp).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/expected_head.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/rope/rope_ops.hpp"
#include "kvevict/score/check_scoring.hpp"
#include "kvevict/score/expected.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// Query statistics and RoPE against the shape.
template <class T>
void check_statistics(std::string_view name, const LayerObservation<T>& o) {
  const auto& mean = o.extras.q_mean;
  const auto& cov = o.extras.q_cov;
  const index_t d = o.shape.head_dim_k;
  if (mean.size() != 1 || mean[0].rows != o.shape.q_heads || mean[0].cols != d)
    fail_argument(name, ": layer ", o.layer, ": q_mean must be one [", o.shape.q_heads, "][", d, ']');
  if (std::ssize(cov) != o.shape.q_heads)
    fail_argument(name, ": layer ", o.layer, " has q_cov of ", cov.size(), " query heads; the shape says ",
                  o.shape.q_heads);
  for (const auto& c : cov)
    if (c.rows != d || c.cols != d)
      fail_argument(name, ": layer ", o.layer, " has q_cov [", c.rows, "][", c.cols, "]; [", d, "][", d,
                    "] is required");
  check_rope(name, o.rope, d);
}

}  // namespace detail

// out: [kv_heads][most tokens of a head]. Throws std::invalid_argument for inputs that are missing or do not fit.
template <CacheElement T>
void score_on(const host_exec& exec, const score::Expected& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  check_scoring(scorer, o, out);
  check_positions(score::Expected::name, o);
  detail::check_statistics(score::Expected::name, o);
  const detail::ExpectedHead kernel(scorer, o.shape);
  parallel_for(exec, out.rows, kernel.floats(o.most_tokens()) * sizeof(float),
               [&](std::int64_t h, std::span<std::byte> scratch) {
                 const auto head = static_cast<index_t>(h);
                 kernel.score_head(o, head, reinterpret_cast<float*>(scratch.data()), out.row(head));
               });
  detail::raise_sinks(scorer.protection(), o, out);
}

}  // namespace kvevict::inline KVEVICT_ABI
