// Rows of a cache to inputs of LKV-T: widened to float, the key rotated back by its position where the network wants it
// before RoPE, distance features appended. Training and inference share this, so they see the same numbers.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/lkv/token_net.hpp"
#include "kvevict/rope/rope_table.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// One row of a cache as floats.
template <CacheElement T>
void widen_row(const T* __restrict row, std::int64_t stride, index_t cols, float* __restrict out) {
  if (stride != 1) {
    for (index_t c = 0; c < cols; ++c) out[c] = to_float(row[c * stride]);
    return;
  }
  index_t c = 0;
#if KVEVICT_SIMD
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<index_t>(hn::Lanes(d));
  if constexpr (std::same_as<T, float>) {
    for (; c + lanes <= cols; c += lanes) hn::StoreU(hn::LoadU(d, row + c), d, out + c);
  } else if constexpr (std::same_as<T, bf16_t>) {
    const hn::Rebind<std::uint16_t, decltype(d)> half;
    const hn::RebindToUnsigned<decltype(d)> bits;
    for (; c + lanes <= cols; c += lanes) {
      const auto raw = hn::LoadU(half, reinterpret_cast<const std::uint16_t*>(row + c));
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, raw))), d, out + c);
    }
  } else {
    const hn::Rebind<hwy::float16_t, decltype(d)> half;
    for (; c + lanes <= cols; c += lanes)
      hn::StoreU(hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(row + c))), d, out + c);
  }
#endif
  for (; c < cols; ++c) out[c] = to_float(row[c]);
}

}  // namespace detail

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
    detail::widen_row(keys.row(row), keys.col_stride, keys.cols, out);
    detail::widen_row(values.row(row), values.col_stride, values.cols, out + keys.cols);
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
