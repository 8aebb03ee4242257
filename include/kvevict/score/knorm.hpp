// Knorm: rows with a small key norm stay.
// Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., 2024, arXiv
// 2406.11430); its code and kvpress agree.
#pragma once
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

// score = -|k|_2 of the key as it lies in the cache, in float32. O(tokens * head_dim_k) per head.
struct KNorm {
  static constexpr std::string_view name = "knorm";
  static constexpr Needs needs = Needs::keys;

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
  friend void score_on(const host_exec& exec, const KNorm& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(exec, o, out);
  }

 private:
  template <class T>
  void score_layer(const host_exec& exec, const LayerObservation<T>& o, Matrix<float> out) const {
    detail::check_scoring(name, needs, sinks, o, out);
    const auto buffer = static_cast<std::size_t>(o.shape.head_dim_k) * sizeof(float);
    parallel_for(exec, out.rows, buffer, [&](std::int64_t h, std::span<std::byte> scratch) {
      const Rows<const T>& keys = o.keys[static_cast<std::size_t>(h)];
      float* to = out.row(static_cast<index_t>(h));
      for (std::int64_t j = 0; j < keys.rows; ++j) {
        const float* k = detail::float_row(keys, j, reinterpret_cast<float*>(scratch.data()));
        to[j] = -std::sqrt(detail::dot(k, k, keys.cols));
      }
    });
    detail::raise_sinks(protect, sinks, o, out);
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
