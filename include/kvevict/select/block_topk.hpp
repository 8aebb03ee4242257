// Selection by blocks, as engines do it whose memory is managed in blocks: rows stay or go with their neighbours. For
// comparison with TopK; what it costs in quality is what row-wise selection gains.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/select/selector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Blocks of `block` rows, counted from row 0, are ranked by their mean score (ties: the earlier block) and kept whole
// until the budget is used up; the last one that enters gives as many of its best rows as still fit. Protected rows
// stay apart, so a block next to them may be shorter.
struct BlockTopK {
  static constexpr std::string_view name = "block";
  index_t block = 16;
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("block", self.block);
  }

  std::size_t scratch_bytes(index_t tokens) const noexcept {
    const std::size_t blocks = block_limit(tokens);
    return 64 + blocks * (sizeof(float) + sizeof(index_t)) +
           topk_scratch_bytes(std::max(static_cast<std::int64_t>(blocks), std::int64_t{std::min(block, tokens)}));
  }

  // Keeps min(budget, tokens) rows. O(tokens). An unprotected NaN score throws NanScore with its token.
  index_t select(std::span<const float> row, index_t budget, Protect protect, std::span<index_t> out,
                 std::span<std::byte> scratch) const {
    if (block < 1) fail_argument("BlockTopK: block = ", block, "; at least 1 is required");
    const index_t kept = detail::check_selection("BlockTopK", row, budget, out);
    const auto tokens = static_cast<index_t>(row.size());
    if (kept == tokens) {
      std::iota(out.begin(), out.begin() + kept, index_t{0});
      return kept;
    }
    if (scratch.size() < scratch_bytes(tokens))
      fail_argument("BlockTopK: ", scratch.size(), " bytes of scratch; ", scratch_bytes(tokens), " are required");
    const ProtectedRows fixed = protect_within(protect, tokens, budget);
    const index_t first = fixed.sinks, last = tokens - fixed.newest, wanted = kept - fixed.count();
    const index_t first_block = first / block;
    const auto begin_of = [&](index_t b) { return std::max(first, (first_block + b) * block); };
    const auto size_of = [&](index_t b) {
      return static_cast<index_t>(std::min<std::int64_t>(last, (std::int64_t{first_block} + b + 1) * block)) -
             begin_of(b);
    };
    const index_t blocks = last > first ? (last - 1) / block - first_block + 1 : 0;

    const std::size_t limit = block_limit(tokens);
    std::byte* memory = scratch.data() + (64 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 64) % 64;
    auto* means = reinterpret_cast<float*>(memory);
    auto* best = reinterpret_cast<index_t*>(memory + limit * sizeof(float));
    const auto rest =
        scratch.subspan(static_cast<std::size_t>(memory - scratch.data()) + limit * (sizeof(float) + sizeof(index_t)));
    for (index_t b = 0; b < blocks; ++b) means[b] = mean(row, begin_of(b), size_of(b));

    std::iota(out.begin(), out.begin() + fixed.sinks, index_t{0});
    index_t* to = out.data() + fixed.sinks;
    index_t entered = wanted / block + (wanted % block != 0), rows = 0;
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

 private:
  std::size_t block_limit(index_t tokens) const noexcept {
    return static_cast<std::size_t>(tokens / std::max(block, 1)) + 2;
  }

  // Summed in row order in double. Infinities of both signs count as +inf.
  static float mean(std::span<const float> row, index_t begin, index_t size) {
    double sum = 0;
    for (index_t i = begin; i < begin + size; ++i) {
      const float score = row[static_cast<std::size_t>(i)];
      if (std::isnan(score)) throw NanScore(0, i);
      sum += static_cast<double>(score);
    }
    return std::isnan(sum) ? std::numeric_limits<float>::infinity() : static_cast<float>(sum / size);
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
