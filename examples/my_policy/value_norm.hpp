// A scorer: rows with a large value vector stay, score = |v|_p. Copy it, rename it, change the loop.
#pragma once
#include <cmath>
#include <cstdint>

#include "kvevict/core/parallel.hpp"
#include "kvevict/score/concepts.hpp"

struct ValueNorm {
  static constexpr std::string_view name = "value-norm";
  static constexpr kvevict::Needs needs = kvevict::Needs::values;

  // Parameters are plain members with defaults; listed below, they can be set and printed by name.
  int norm = 2;  // 1 or 2
  kvevict::index_t sinks = 0;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("norm", self.norm);
    visit("sinks", self.sinks);
  }

  kvevict::index_t window_rows() const { return 0; }  // looks with no queries
  kvevict::Protect protection() const { return {sinks, 0, kvevict::ProtectShare::half}; }

  // out: [kv_heads][most tokens of a head].
  template <kvevict::CacheElement T>
  friend void score_on(const kvevict::host_exec& exec, const ValueNorm& scorer, const kvevict::LayerObservation<T>& o,
                       kvevict::Matrix<float> out) {
    const int norm = scorer.norm;
    if (norm != 1 && norm != 2) kvevict::fail_argument("value-norm: norm=", norm, "; 1 or 2 is required");
    kvevict::parallel_for(exec, o.shape.kv_heads, [&](std::int64_t head) {
      const auto& values = o.values[static_cast<std::size_t>(head)];
      float* scores = out.row(static_cast<kvevict::index_t>(head));
      for (std::int64_t r = 0; r < values.rows; ++r) {
        float sum = 0;
        for (kvevict::index_t c = 0; c < values.cols; ++c) {
          const float x = kvevict::to_float(values.at(r, c));
          sum += norm == 1 ? std::abs(x) : x * x;
        }
        scores[r] = norm == 1 ? sum : std::sqrt(sum);
      }
    });
  }
};
