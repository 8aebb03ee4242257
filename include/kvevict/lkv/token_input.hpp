// Rows of a cache to inputs of LKV-T: widened to float, the key turned back by its position where the network wants it
// before RoPE, distance features appended. Training and inference share this, so they see the same numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/lkv/token_net.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Turns rotated keys back to position 0. Angles come from two tables in double, position = 64 a + b, joined by one
// complex product; the error is below 2e-7 of a row's norm, far below what a float32 model rounds its own angles by.
class KeyUnrotation {
 public:
  // last_position: the largest position that will be asked for; 0 or more. O(rotary_dim * last_position / 64).
  KeyUnrotation(const Rope& rope, index_t last_position)
      : style_(rope.style), pairs_(static_cast<std::size_t>(rope.rotary_dim / 2)) {
    const auto turns = static_cast<std::size_t>(last_position) / step + 1;
    coarse_.resize(turns * 2 * pairs_);
    fine_.resize(step * 2 * pairs_);
    fill(coarse_, rope, turns, static_cast<double>(step), 1.0);
    fill(fine_, rope, step, 1.0, 1.0 / static_cast<double>(rope.attention_factor));
  }

  void apply(index_t position, float* __restrict key) const {
    const auto p = static_cast<std::size_t>(position);
    const float* __restrict a = coarse_.data() + p / step * 2 * pairs_;
    const float* __restrict b = fine_.data() + p % step * 2 * pairs_;
    const std::size_t n = pairs_, first = style_ == RopeStyle::half ? n : 1, each = style_ == RopeStyle::half ? 1 : 2;
    for (std::size_t i = 0; i < n; ++i) {
      const float c = a[i] * b[i] - a[n + i] * b[n + i], s = a[n + i] * b[i] + a[i] * b[n + i];
      const float x = key[each * i], y = key[each * i + first];
      key[each * i] = x * c + y * s;
      key[each * i + first] = y * c - x * s;
    }
  }

 private:
  static constexpr std::size_t step = 64;

  // Rows of [cos x pairs, sin x pairs].
  void fill(std::vector<float>& table, const Rope& rope, std::size_t rows, double each, double factor) const {
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t i = 0; i < pairs_; ++i) {
        const double angle = each * static_cast<double>(r) * static_cast<double>(rope.inv_freq[i]);
        table[r * 2 * pairs_ + i] = static_cast<float>(factor * std::cos(angle));
        table[r * 2 * pairs_ + pairs_ + i] = static_cast<float>(factor * std::sin(angle));
      }
  }

  RopeStyle style_;
  std::size_t pairs_;
  std::vector<float> coarse_, fine_;
};

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
  const KeyUnrotation* unrotation = nullptr;  // where input.key_frame is pre_rope
  index_t newest = 0;                         // position of the newest prompt row, for the distance
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
      frame.unrotation->apply(positions[static_cast<std::size_t>(row)], out);
    if (frame.input.features == TokenFeatures::distance) {
      const auto f = distance_features(frame.newest - positions[static_cast<std::size_t>(row)]);
      out[keys.cols + values.cols] = f[0];
      out[keys.cols + values.cols + 1] = f[1];
    }
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
