// Top-k of many rows at once, each with its own length and its own k.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/topk.hpp"

namespace kvevict::inline KVEVICT_ABI {

// For each row r the indices of the offsets[r + 1] - offsets[r] largest of its first lengths[r] scores, ascending, in
// out[offsets[r]..offsets[r + 1]). lengths: [rows], each at most scores.cols; offsets: [rows + 1]. Rows run in
// parallel; the result does not depend on the threads. Throws NanScore naming row and token.
inline void topk_rows(const host_exec& exec, Matrix<const float> scores, std::span<const index_t> lengths,
                      std::span<const std::int64_t> offsets, std::span<index_t> out) {
  const auto rows = static_cast<std::size_t>(scores.rows);
  if (lengths.size() != rows || offsets.size() != rows + 1)
    fail_argument("topk_rows: ", lengths.size(), " lengths and ", offsets.size(), " offsets for ", rows, " rows; ",
                  rows, " and ", rows + 1, " are required");
  index_t longest = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    if (lengths[r] < 0 || lengths[r] > scores.cols)
      fail_argument("topk_rows: row ", r, " has ", lengths[r], " scores; 0 to ", scores.cols, " are possible");
    if (offsets[r] < 0 || offsets[r + 1] < offsets[r] || offsets[r + 1] - offsets[r] > lengths[r])
      fail_argument("topk_rows: row ", r, ": offsets ", offsets[r], " to ", offsets[r + 1],
                    " ask for more or less than 0 to ", lengths[r], " indices");
    longest = std::max(longest, lengths[r]);
  }
  if (out.size() < static_cast<std::size_t>(offsets[rows]))
    fail_argument("topk_rows: out holds ", out.size(), " indices; ", offsets[rows], " are written");
  parallel_for(exec, scores.rows, topk_scratch_bytes(longest), [&](std::int64_t row, std::span<std::byte> scratch) {
    const auto r = static_cast<std::size_t>(row);
    const auto k = static_cast<index_t>(offsets[r + 1] - offsets[r]);
    detail::ranking_row(static_cast<index_t>(row), [&] {
      topk(std::span(scores.row(static_cast<index_t>(row)), static_cast<std::size_t>(lengths[r])), k,
           slice(out, offsets[r], k), scratch);
    });
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
