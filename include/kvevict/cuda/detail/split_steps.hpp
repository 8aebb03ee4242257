// Heads that share rows by score, on the device: what each has among the best of all, and the softmax that makes scores
// of different heads comparable. What is set aside and reserved comes from the host (split_tables.hpp).
#pragma once
#include <cstdint>

#include "kvevict/allocate/score_split.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cuda/detail/cta.hpp"
#include "kvevict/cuda/detail/group_steps.hpp"
#include "kvevict/cuda/detail/rules.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

struct ShareArgs {
  index_t heads;            // of a group
  const index_t* reserved;  // [rows]; rows that stay whatever the other heads of the group hold
  index_t* budgets;         // [rows]
};
struct ShareShared {
  BlockScratch scratch;
};

// Last step, block x = group x, after the cut over all candidates is known: the rows of each head.
template <class Cta>
KVEVICT_DEVICE void share_rows(Cta& cta, const ShareArgs& share, const GroupArgs& args, ShareShared& shared) {
  const index_t group = cta.block_x();
  const std::int64_t first = std::int64_t{group} * share.heads;
  const Threshold cut = cut_of(*args.state(FixedDigits::passes, group));
  std::uint32_t ties = cut.ties > 0 ? static_cast<std::uint32_t>(cut.ties) : 0u;
  for (index_t base = 0; base < share.heads; base += cta.threads()) {
    const std::int64_t row = first + base + cta.thread();
    const bool in = base + cta.thread() < share.heads;
    std::uint32_t above = 0, equal = 0;
    if (in) {
      for (index_t c = 0; c < args.chunks; ++c) {
        above += static_cast<std::uint32_t>(args.counts[row * args.chunks + c].above);
        equal += static_cast<std::uint32_t>(args.counts[row * args.chunks + c].equal);
      }
      const auto extra = static_cast<std::uint32_t>(args.extra[row]);
      if (cut.above(args.ceilings[row])) above += extra;
      if (cut.equal(args.ceilings[row])) equal += extra;
    }
    const Scanned<std::uint32_t> before = block_scan(cta, equal, shared.scratch);
    const std::uint32_t left = before.before < ties ? ties - before.before : 0u;
    if (in) share.budgets[row] = share.reserved[row] + static_cast<index_t>(above + min(left, equal));
    ties -= min(ties, before.total);
  }
}

struct SoftmaxArgs {
  const index_t* tokens;  // [rows]
  const float* scores;    // [rows][stride]
  float* out;             // [rows][stride]
  std::int64_t stride;
};
struct SoftmaxShared {
  double sum[most_warps];
  float largest[most_warps];
};

// Log of the softmax of a row over its finite entries; infinities and NaN stay. Block x = row x. As on the host.
template <class Cta>
KVEVICT_DEVICE void log_softmax_row(Cta& cta, const SoftmaxArgs& args, SoftmaxShared& shared) {
  const std::int64_t row = cta.block_x();
  const index_t tokens = args.tokens[row];
  const float* in = args.scores + row * args.stride;
  float* out = args.out + row * args.stride;
  float highest = detail::float_of(0xff800000u);
  for (index_t i = cta.thread(); i < tokens; i += cta.threads())
    if (detail::is_finite_score(in[i])) highest = max(highest, in[i]);
  highest = warp_max(cta, highest);
  if (cta.lane() == 0) shared.largest[cta.warp()] = highest;
  cta.sync();
  highest = shared.largest[0];
  for (int w = 1; w < cta.warps(); ++w) highest = max(highest, shared.largest[w]);
  double sum = 0;
  for (index_t i = cta.thread(); i < tokens; i += cta.threads())
    if (detail::is_finite_score(in[i])) sum += static_cast<double>(cta.exp(in[i] - highest));
  sum = warp_sum(cta, sum);
  if (cta.lane() == 0) shared.sum[cta.warp()] = sum;
  cta.sync();
  sum = shared.sum[0];
  for (int w = 1; w < cta.warps(); ++w) sum += shared.sum[w];
  const auto log_sum = static_cast<float>(cta.log(sum));
  for (index_t i = cta.thread(); i < tokens; i += cta.threads()) out[i] = detail::log_share(in[i], highest, log_sum);
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
