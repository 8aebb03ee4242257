// Selection by blocks on the host.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/cpu/topk.hpp"
#include "kvevict/select/block_topk.hpp"
#include "kvevict/select/nan_score.hpp"
#include "kvevict/select/ordered_key.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

inline std::size_t block_limit(const BlockTopK& selector, index_t tokens) noexcept {
  return static_cast<std::size_t>(tokens / std::max(selector.block, 1)) + 2;
}

// Summed in row order in double. Infinities of both signs count as +inf.
inline float block_mean(std::span<const float> row, index_t begin, index_t size) {
  double sum = 0;
  for (index_t i = begin; i < begin + size; ++i) {
    const float score = row[static_cast<std::size_t>(i)];
    if (is_nan_score(score)) throw NanScore(0, i);
    sum += static_cast<double>(score);
  }
  const auto mean = static_cast<float>(sum / size);
  return is_nan_score(mean) ? std::numeric_limits<float>::infinity() : mean;
}

}  // namespace detail

inline std::size_t select_scratch_bytes(const BlockTopK& selector, index_t tokens) noexcept {
  const std::size_t blocks = detail::block_limit(selector, tokens);
  return 64 + blocks * (sizeof(float) + sizeof(index_t)) +
         topk_scratch_bytes(
             std::max(static_cast<std::int64_t>(blocks), std::int64_t{std::min(selector.block, tokens)}));
}

// Keeps min(budget, tokens) rows. O(tokens). An unprotected NaN score throws NanScore with its token.
inline index_t select_row(const BlockTopK& selector, std::span<const float> row, index_t budget,
                          const HeadProtect& protect, std::span<index_t> out, std::span<std::byte> scratch) {
  if (selector.block < 1) fail_argument("BlockTopK: block = ", selector.block, "; at least 1 is required");
  const index_t kept = detail::check_selection("BlockTopK", row, budget, protect, out);
  const auto tokens = static_cast<index_t>(row.size());
  if (kept == tokens) {
    std::iota(out.begin(), out.begin() + kept, index_t{0});
    return kept;
  }
  if (scratch.size() < select_scratch_bytes(selector, tokens))
    fail_argument("BlockTopK: ", scratch.size(), " bytes of scratch; ", select_scratch_bytes(selector, tokens),
                  " are required");
  const ProtectedRows fixed = protect_within(protect, budget);
  const index_t first = fixed.sinks, last = tokens - fixed.newest, wanted = kept - fixed.count();
  const index_t first_block = first / selector.block;
  const auto begin_of = [&](index_t b) { return std::max(first, (first_block + b) * selector.block); };
  const auto size_of = [&](index_t b) {
    return static_cast<index_t>(std::min<std::int64_t>(last, (std::int64_t{first_block} + b + 1) * selector.block)) -
           begin_of(b);
  };
  const index_t blocks = last > first ? (last - 1) / selector.block - first_block + 1 : 0;

  const std::size_t limit = detail::block_limit(selector, tokens);
  std::byte* memory = scratch.data() + (64 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 64) % 64;
  auto* means = reinterpret_cast<float*>(memory);
  auto* best = reinterpret_cast<index_t*>(memory + limit * sizeof(float));
  const auto rest =
      scratch.subspan(static_cast<std::size_t>(memory - scratch.data()) + limit * (sizeof(float) + sizeof(index_t)));
  for (index_t b = 0; b < blocks; ++b) means[b] = detail::block_mean(row, begin_of(b), size_of(b));

  std::iota(out.begin(), out.begin() + fixed.sinks, index_t{0});
  index_t* to = out.data() + fixed.sinks;
  index_t entered = wanted / selector.block + (wanted % selector.block != 0), rows = 0;
  for (;; ++entered) {  // shorter blocks at the ends may make room for one or two more
    detail::topk_from<detail::Passes>(means, blocks, entered, 0, best, rest);
    rows = 0;
    for (index_t b = 0; b < entered; ++b) rows += size_of(best[b]);
    if (rows >= wanted) break;
  }
  index_t worst = 0;  // the last that entered: least mean, and the later of equals
  for (index_t b = 1; b < entered; ++b)
    if (means[best[b]] <= means[best[worst]]) worst = b;
  for (index_t b = 0; b < entered; ++b) {
    const index_t begin = begin_of(best[b]), size = size_of(best[b]);
    const index_t taken = b == worst ? size - (rows - wanted) : size;
    detail::topk_from<detail::Passes>(row.data() + begin, size, taken, begin, to, rest);
    to += taken;
  }
  std::iota(to, out.data() + kept, tokens - fixed.newest);
  return kept;
}

}  // namespace kvevict::inline KVEVICT_ABI
