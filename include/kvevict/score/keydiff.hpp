// KeyDiff: rows whose keys point away from the mean direction of the head's keys stay.
// Source: KeyDiff (Park et al., 2025, arXiv 2504.15364); kvpress agrees.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvevict/core/parallel.hpp"
#include "kvevict/score/detail/row_math.hpp"
#include "kvevict/score/detail/scorer_support.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// score = -cos(k, a), a = mean of k / |k| over all keys of the head. A zero key has cosine 0. The anchor is summed in
// float64. O(tokens * head_dim_k) per head, two passes over the keys.
struct KeyDiff {
  static constexpr std::string_view name = "keydiff";
  static constexpr Needs needs = Needs::keys;
  static constexpr bool heads_comparable = true;  // cosines

  index_t sinks = 0;
  ProtectShare protect = ProtectShare::half;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks);
    visit("protect", self.protect);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {sinks, 0, protect}; }

  // out: [kv_heads][most tokens of a head].
  template <CacheElement T>
  friend void score_on(const host_exec& exec, const KeyDiff& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(exec, o, out);
  }

 private:
  template <class T>
  void score_layer(const host_exec& exec, const LayerObservation<T>& o, Matrix<float> out) const {
    detail::check_scoring(name, needs, sinks, o, out);
    const auto dim = static_cast<std::size_t>(o.shape.head_dim_k);
    parallel_for(
        exec, out.rows, dim * (sizeof(double) + 2 * sizeof(float)), [&](std::int64_t h, std::span<std::byte> scratch) {
          auto* sum = reinterpret_cast<double*>(scratch.data());
          auto* anchor = reinterpret_cast<float*>(sum + dim);
          score_head(o.keys[static_cast<std::size_t>(h)], sum, anchor, anchor + dim, out.row(static_cast<index_t>(h)));
        });
    detail::raise_sinks(protect, sinks, o, out);
  }

  // sum, anchor, buffer: [cols]; out: [rows], which holds the norms between the two passes.
  template <class T>
  static void score_head(const Rows<const T>& keys, double* sum, float* anchor, float* buffer, float* out) {
    std::fill_n(sum, keys.cols, 0.0);
    for (std::int64_t j = 0; j < keys.rows; ++j) {
      const float* k = detail::float_row(keys, j, buffer);
      out[j] = std::sqrt(detail::dot(k, k, keys.cols));
      const float inverse = 1.f / std::max(out[j], 1e-12f);
      for (index_t c = 0; c < keys.cols; ++c) sum[c] += static_cast<double>(k[c] * inverse);
    }
    for (index_t c = 0; c < keys.cols; ++c) anchor[c] = static_cast<float>(sum[c] / static_cast<double>(keys.rows));
    const float length = std::sqrt(detail::dot(anchor, anchor, keys.cols));
    for (std::int64_t j = 0; j < keys.rows; ++j) {
      const float* k = detail::float_row(keys, j, buffer);
      out[j] = -detail::dot(k, anchor, keys.cols) / std::max(out[j] * length, 1e-8f);
    }
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
