// Rows of a cache to inputs of LKV-T: widened to float, the key rotated back by its position where the network wants it
// before RoPE, distance features appended. Training and inference share this, so they see the same numbers.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/vector.hpp"
#include "kvevict/lkv/token_net.hpp"
#include "kvevict/rope/rope_table.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What rows of one head become inputs with.
struct TokenFrame {
  TokenInput input;
  const InverseRotation* inverse = nullptr;  // where input.key_frame is pre_rope
  index_t newest = 0;                        // position of the newest prompt row, for the distance
};

// out: [count][keys.cols + values.cols + features], written, for rows [first, first + count). positions: of all rows.
template <CacheElement T>
void token_inputs(const Rows<const T>& keys, const Rows<const T>& values, std::span<const index_t> positions,
                  const TokenFrame& frame, std::int64_t first, std::int64_t count, float* out) {
  const index_t inputs = keys.cols + values.cols + frame.input.features_count();
  for (std::int64_t i = 0; i < count; ++i, out += inputs) {
    const std::int64_t row = first + i;
    simd::widen_row(keys.row(row), keys.col_stride, keys.cols, out);
    simd::widen_row(values.row(row), values.col_stride, values.cols, out + keys.cols);
    if (frame.input.key_frame == KeyFrame::pre_rope)
      frame.inverse->apply(positions[static_cast<std::size_t>(row)], out);
    if (frame.input.features == TokenFeatures::distance) {
      const auto f = distance_features(frame.newest - positions[static_cast<std::size_t>(row)]);
      out[keys.cols + values.cols] = f[0];
      out[keys.cols + values.cols + 1] = f[1];
    }
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
