// StreamingLLM as a scorer: newer rows are better, and the first rows (the attention sinks) are protected.
// Source: Efficient Streaming Language Models with Attention Sinks (Xiao et al., 2023, arXiv 2309.17453).
#pragma once
#include <string_view>

#include "kvevict/score/detail/scorer_support.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// score = index of the row. Reads no row. With protect=full a head that keeps b rows keeps `sinks` and the newest
// b - sinks, as the published method does; `half` leaves at least half of b to the newest. O(tokens) per head.
struct Position {
  static constexpr std::string_view name = "position";
  static constexpr Needs needs = Needs::none;

  index_t sinks = 4;
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
  friend void score_on(const host_exec&, const Position& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(o, out);
  }

 private:
  template <class T>
  void score_layer(const LayerObservation<T>& o, Matrix<float> out) const {
    detail::check_scoring(name, needs, sinks, o, out);
    for (index_t h = 0; h < out.rows; ++h)
      for (index_t j = 0; j < o.tokens(h); ++j) out.at(h, j) = static_cast<float>(j);
    detail::raise_sinks(protect, sinks, o, out);
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
