// Expected Attention: rows that queries to come are expected to look at, if queries are normally distributed.
// Source: Expected Attention (Devoto et al., 2025, arXiv 2510.00636); kvpress' ExpectedAttentionPress.
//
//   mu, S: mean and covariance of the prompt's queries before RoPE, per query head
//   R = mean rotation over the next `future` positions; mu <- R mu, S <- R S R^T
//   z_j = c <mu, k_j> + c^2/2 k_j^T S k_j     log of the expected exp(c <q, k_j>), c = softmax_scale
//   s = mean over the group of softmax(z) over the rows after the sinks; score = (s + epsilon) |v|_2
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/core/parallel.hpp"
#include "kvevict/rope/rope_ops.hpp"
#include "kvevict/score/detail/row_math.hpp"
#include "kvevict/score/detail/scorer_support.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// The published setting is sinks=4 with statistics from row 4 on (q_stats_first); the default protects nothing, like
// every scorer that does not ask for more. Sinks have no score of their own: -inf, or with protect=score the layer's
// largest + 1. The next position is the head's last + 1. O(q_heads * tokens * head_dim_k^2 / 2).
struct Expected {
  static constexpr std::string_view name = "expected";
  static constexpr Needs needs = Needs::keys | Needs::values | Needs::positions | Needs::rope | Needs::q_stats;
  static constexpr bool heads_comparable = true;  // expected attention masses

  index_t future = 512;    // positions that the rotation is averaged over
  index_t sinks = 0;       // rows that stay out of the softmax and are protected
  bool covariance = true;  // false: z without its second term
  bool value_norm = true;  // false: score = s
  float epsilon = 0.f;     // keeps large values in play where s is small
  ProtectShare protect = ProtectShare::half;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("future", self.future);
    visit("sinks", self.sinks);
    visit("covariance", self.covariance);
    visit("value_norm", self.value_norm);
    visit("epsilon", self.epsilon);
    visit("protect", self.protect);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {sinks, 0, protect}; }

  // out: [kv_heads][most tokens of a head].
  template <CacheElement T>
  friend void score_on(const host_exec& exec, const Expected& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(exec, o, out);
  }

 private:
  template <class T>
  void score_layer(const host_exec& exec, const LayerObservation<T>& o, Matrix<float> out) const {
    detail::check_scoring(name, needs, sinks, o, out);
    check_statistics(o);
    const Sizes sizes(o.shape);
    const std::size_t floats = sizes.group * (sizes.padded * sizes.padded + sizes.padded) +
                               static_cast<std::size_t>(block) * sizes.padded + sizes.wider +
                               sizes.group * static_cast<std::size_t>(o.most_tokens());
    parallel_for(exec, out.rows, floats * sizeof(float), [&](std::int64_t h, std::span<std::byte> scratch) {
      score_head(o, static_cast<index_t>(h), sizes, reinterpret_cast<float*>(scratch.data()),
                 out.row(static_cast<index_t>(h)));
    });
    detail::raise_sinks(protect, sinks, o, out);
  }

  static constexpr index_t block = 64;  // key rows that are widened at once
  static constexpr index_t tile = 4;    // of them that share a load of the covariance; logits() names them
  static constexpr index_t lanes = 16;  // columns of the covariance that stay in registers

  struct Sizes {
    std::size_t group, dim, padded, wider;
    explicit Sizes(const CacheShape& s)
        : group(static_cast<std::size_t>(s.group())),
          dim(static_cast<std::size_t>(s.head_dim_k)),
          padded((dim + lanes - 1) / lanes * lanes),
          wider(static_cast<std::size_t>(std::max(s.head_dim_k, s.head_dim_v))) {}
  };

  template <class T>
  void check_statistics(const LayerObservation<T>& o) const {
    if (future < 1) fail_argument(name, ": future=", future, "; 1 or more positions are required");
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
    if (!covariance) return;
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
    for (index_t r = 0; r < tile; ++r) z[r] = detail::dot(keys + r * padded, mean, padded);
    if (!covariance) return;
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
      z[0] += detail::dot(s0, k0 + first, lanes);
      z[1] += detail::dot(s1, k1 + first, lanes);
      z[2] += detail::dot(s2, k2 + first, lanes);
      z[3] += detail::dot(s3, k3 + first, lanes);
    }
  }

  template <class T>
  void score_head(const LayerObservation<T>& o, index_t head, const Sizes& sizes, float* memory, float* out) const {
    const Rows<const T>& keys = o.keys[static_cast<std::size_t>(head)];
    const auto tokens = static_cast<index_t>(keys.rows), group = static_cast<index_t>(sizes.group);
    const index_t first = std::min(sinks, tokens), padded = static_cast<index_t>(sizes.padded);
    std::fill_n(out, first, -std::numeric_limits<float>::infinity());
    if (first == tokens) return;

    float* means = memory;
    float* forms = means + sizes.group * sizes.padded;
    float* wide = forms + sizes.group * sizes.padded * sizes.padded;
    float* buffer = wide + static_cast<std::size_t>(block) * sizes.padded;
    float* z = buffer + sizes.wider;  // [group][tokens]
    const MeanRotation rotation(o.rope, o.positions[static_cast<std::size_t>(head)].back() + 1, future);
    for (index_t g = 0; g < group; ++g)
      prepare(o, head * group + g, rotation, sizes.padded, means + g * padded,
              forms + std::int64_t{g} * padded * padded);

    for (index_t begin = first; begin < tokens; begin += block) {
      const index_t rows = std::min(block, tokens - begin);
      std::fill_n(wide, static_cast<std::size_t>(block) * sizes.padded, 0.f);
      for (index_t r = 0; r < rows; ++r)
        std::copy_n(detail::float_row(keys, begin + r, buffer), sizes.dim, wide + r * padded);
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
    if (!value_norm) return;
    const Rows<const T>& values = o.values[static_cast<std::size_t>(head)];
    for (index_t j = first; j < tokens; ++j) {
      const float* v = detail::float_row(values, j, buffer);
      out[j] = (out[j] + epsilon) * std::sqrt(detail::dot(v, v, values.cols));
    }
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
