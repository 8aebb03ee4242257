// One head's work of Expected Attention (score/expected.hpp): the rotated statistics as a mean and the upper triangle
// of a quadratic form, and the logits of all keys in tiles that share each load of the form.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/rope/rope_ops.hpp"
#include "kvevict/score/detail/row_math.hpp"
#include "kvevict/score/expected.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

class ExpectedHead {
 public:
  ExpectedHead(const score::Expected& scorer, const CacheShape& s)
      : scorer_(scorer),
        group_(static_cast<std::size_t>(s.group())),
        dim_(static_cast<std::size_t>(s.head_dim_k)),
        padded_((dim_ + lanes - 1) / lanes * lanes),
        wider_(static_cast<std::size_t>(std::max(s.head_dim_k, s.head_dim_v))) {}

  // Floats of working memory for a head of `tokens` rows.
  std::size_t floats(index_t tokens) const noexcept {
    return group_ * (padded_ * padded_ + padded_) + static_cast<std::size_t>(block) * padded_ + wider_ +
           group_ * static_cast<std::size_t>(tokens);
  }

  // memory: floats(tokens) or more. out: [tokens of the head].
  template <class T>
  void score_head(const LayerObservation<T>& o, index_t head, float* memory, float* out) const {
    const Rows<const T>& keys = o.keys[static_cast<std::size_t>(head)];
    const auto tokens = static_cast<index_t>(keys.rows), group = static_cast<index_t>(group_);
    const index_t first = std::min(scorer_.sinks, tokens), padded = static_cast<index_t>(padded_);
    std::fill_n(out, first, -std::numeric_limits<float>::infinity());
    if (first == tokens) return;

    float* means = memory;
    float* forms = means + group_ * padded_;
    float* wide = forms + group_ * padded_ * padded_;
    float* buffer = wide + static_cast<std::size_t>(block) * padded_;
    float* z = buffer + wider_;  // [group][tokens]
    const MeanRotation rotation(o.rope, o.positions[static_cast<std::size_t>(head)].back() + 1, scorer_.future);
    for (index_t g = 0; g < group; ++g)
      prepare(o, head * group + g, rotation, padded_, means + g * padded, forms + std::int64_t{g} * padded * padded);

    for (index_t begin = first; begin < tokens; begin += block) {
      const index_t rows = std::min(block, tokens - begin);
      std::fill_n(wide, static_cast<std::size_t>(block) * padded_, 0.f);
      for (index_t r = 0; r < rows; ++r) std::copy_n(float_row(keys, begin + r, buffer), dim_, wide + r * padded);
      for (index_t g = 0; g < group; ++g)
        for (index_t r = 0; r < rows; r += tile) {
          float got[tile];
          logits(wide + r * padded, means + g * padded, forms + std::int64_t{g} * padded * padded, padded, got);
          std::copy_n(got, std::min(tile, rows - r), z + std::int64_t{g} * tokens + begin + r);
        }
    }

    std::fill(out + first, out + tokens, 0.f);
    for (index_t g = 0; g < group; ++g) {
      float* row = z + std::int64_t{g} * tokens;
      const float most = *std::max_element(row + first, row + tokens);
      double sum = 0;
      for (index_t j = first; j < tokens; ++j) sum += static_cast<double>(row[j] = std::exp(row[j] - most));
      const auto weight = static_cast<float>(1.0 / (sum * group));
      for (index_t j = first; j < tokens; ++j) out[j] += weight * row[j];
    }
    if (!scorer_.value_norm) return;
    const Rows<const T>& values = o.values[static_cast<std::size_t>(head)];
    for (index_t j = first; j < tokens; ++j) {
      const float* v = float_row(values, j, buffer);
      out[j] = (out[j] + scorer_.epsilon) * std::sqrt(dot(v, v, values.cols));
    }
  }

 private:
  static constexpr index_t block = 64;  // key rows that are widened at once
  static constexpr index_t tile = 4;    // of them that share a load of the covariance; logits() names them
  static constexpr index_t lanes = 16;  // columns of the covariance that stay in registers

  // Both statistics of one query head after the mean rotation, with the scale inside, ready for z(): mean [padded] and
  // form [padded][padded], the upper triangle of the quadratic form with its off-diagonal part doubled.
  template <class T>
  void prepare(const LayerObservation<T>& o, index_t q_head, const MeanRotation& rotation, std::size_t padded,
               float* mean, float* form) const {
    const auto d = static_cast<std::size_t>(o.shape.head_dim_k);
    const auto scale = static_cast<double>(o.softmax_scale);
    std::vector<double> row(d);
    const auto& m = o.extras.q_mean[0];
    for (std::size_t i = 0; i < d; ++i) row[i] = static_cast<double>(m.at(q_head, static_cast<std::int64_t>(i)));
    rotation.apply(row.data(), 1);
    std::fill_n(mean, padded, 0.f);
    for (std::size_t i = 0; i < d; ++i) mean[i] = static_cast<float>(scale * row[i]);
    if (!scorer_.covariance) return;
    const auto& c = o.extras.q_cov[static_cast<std::size_t>(q_head)];
    std::vector<double> full(d * d);
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j)
        full[i * d + j] = static_cast<double>(c.at(static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)));
    for (std::size_t i = 0; i < d; ++i) rotation.apply(full.data() + i * d, 1);                    // S R^T
    for (std::size_t j = 0; j < d; ++j) rotation.apply(full.data() + j, static_cast<index_t>(d));  // R S R^T
    std::fill_n(form, padded * padded, 0.f);
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = i; j < d; ++j) {
        const double both = i == j ? full[i * d + i] : full[i * d + j] + full[j * d + i];
        form[i * padded + j] = static_cast<float>(0.5 * scale * scale * both);
      }
  }

  // z of `tile` rows: keys [tile][padded]. Column panels of the triangle end at their last row.
  void logits(const float* __restrict keys, const float* mean, const float* form, index_t padded,
              float* __restrict z) const {
    for (index_t r = 0; r < tile; ++r) z[r] = dot(keys + r * padded, mean, padded);
    if (!scorer_.covariance) return;
    const float *k0 = keys, *k1 = k0 + padded, *k2 = k1 + padded, *k3 = k2 + padded;
    for (index_t first = 0; first < padded; first += lanes) {
      // One array per row, named: compilers keep these in registers, one two-dimensional array they do not.
      float s0[lanes] = {}, s1[lanes] = {}, s2[lanes] = {}, s3[lanes] = {};
      for (index_t i = 0; i < first + lanes; ++i) {
        const float* __restrict line = form + std::int64_t{i} * padded + first;
        const float a = k0[i], b = k1[i], c = k2[i], d = k3[i];
        for (index_t l = 0; l < lanes; ++l) {
          s0[l] += a * line[l];
          s1[l] += b * line[l];
          s2[l] += c * line[l];
          s3[l] += d * line[l];
        }
      }
      z[0] += dot(s0, k0 + first, lanes);
      z[1] += dot(s1, k1 + first, lanes);
      z[2] += dot(s2, k2 + first, lanes);
      z[3] += dot(s3, k3 + first, lanes);
    }
  }

  const score::Expected& scorer_;
  std::size_t group_, dim_, padded_, wider_;
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
