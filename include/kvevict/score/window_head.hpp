// Column sums of the window attention of one KV head: the arithmetic under score/window_attention.hpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::detail {

// Extent of one head's work.
struct WindowSize {
  index_t dim = 0, rows = 0, group = 0;  // window rows used per query head
  index_t tokens = 0, past = 0;          // past: tokens that get a sum
  bool store = false;                    // keep the exponentials of one pass instead of computing them twice
};

template <class T>
struct WindowHead {
  WindowSize size;
  Rows<const T> keys;                        // [tokens][dim]
  std::span<const Rows<const T>> queries;    // [group] of [recorded][dim]; the newest size.rows are used
  std::span<const index_t> key_positions;    // [tokens], ascending; empty: row j has position j
  std::span<const index_t> query_positions;  // [recorded], ascending
  std::span<const float> lse;                // [group * recorded], or empty
  float softmax_scale = 1.f;
  float weight = 1.f;  // factor of every probability
};

// Bytes that window_sums needs.
inline std::size_t window_scratch(const WindowSize& s) noexcept {
  return (static_cast<std::size_t>(s.tokens) + static_cast<std::size_t>(s.dim)) * sizeof(float);
}

// sums: [group][past], or [1][past] where all query heads add to one row.
template <class T>
void window_sums(const WindowHead<T>& w, Matrix<float> sums, std::span<std::byte> scratch) {
  const WindowSize& s = w.size;
  const auto recorded = static_cast<index_t>(w.query_positions.size());
  float* const logits = reinterpret_cast<float*>(scratch.data());
  float* const query = logits + s.tokens;
  for (index_t r = 0; r < sums.rows; ++r) std::fill_n(sums.row(r), s.past, 0.f);
  for (index_t g = 0; g < s.group; ++g)
    for (index_t i = recorded - s.rows; i < recorded; ++i) {
      const index_t at = w.query_positions[static_cast<std::size_t>(i)];
      const index_t visible =
          w.key_positions.empty()
              ? std::min(s.tokens, at + 1)
              : static_cast<index_t>(std::upper_bound(w.key_positions.begin(), w.key_positions.end(), at) -
                                     w.key_positions.begin());
      if (visible == 0) continue;
      for (index_t c = 0; c < s.dim; ++c)
        query[c] = to_float(w.queries[static_cast<std::size_t>(g)].at(i, c)) * w.softmax_scale;
      float largest = -std::numeric_limits<float>::infinity();
      for (index_t j = 0; j < visible; ++j) {
        float dot = 0.f;
        for (index_t c = 0; c < s.dim; ++c) dot += query[c] * to_float(w.keys.at(j, c));
        logits[j] = dot;
        largest = std::max(largest, dot);
      }
      float factor = w.weight;
      if (w.lse.empty()) {
        double mass = 0;
        for (index_t j = 0; j < visible; ++j) mass += static_cast<double>(std::exp(logits[j] - largest));
        factor = static_cast<float>(static_cast<double>(w.weight) / mass);
      } else {
        largest = w.lse[static_cast<std::size_t>(g) * static_cast<std::size_t>(recorded) + static_cast<std::size_t>(i)];
      }
      float* const out = sums.row(sums.rows == 1 ? 0 : g);
      for (index_t j = 0; j < std::min(visible, s.past); ++j) out[j] += factor * std::exp(logits[j] - largest);
    }
}

}  // namespace kvevict::detail
