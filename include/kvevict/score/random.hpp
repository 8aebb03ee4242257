// Random scores: what any policy has to beat. They follow from seed, layer, head and position alone, so they are the
// same on every platform and do not change when rows before were evicted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvevict/core/splitmix64.hpp"
#include "kvevict/score/detail/scorer_support.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace score {

// score = (splitmix64(seed ^ splitmix64(layer << 40 ^ head << 32 ^ position)) >> 40) * 2^-24, in [0, 1).
struct Random {
  static constexpr std::string_view name = "random";
  static constexpr Needs needs = Needs::positions;

  std::uint64_t seed = 0;
  index_t sinks = 0;
  ProtectShare protect = ProtectShare::half;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("seed", self.seed);
    visit("sinks", self.sinks);
    visit("protect", self.protect);
  }

  index_t window_rows() const noexcept { return 0; }
  Protect protection() const noexcept { return {sinks, 0, protect}; }

  // out: [kv_heads][most tokens of a head].
  template <CacheElement T>
  friend void score_on(const host_exec&, const Random& s, const LayerObservation<T>& o, Matrix<float> out) {
    s.score_layer(o, out);
  }

 private:
  template <class T>
  void score_layer(const LayerObservation<T>& o, Matrix<float> out) const {
    detail::check_scoring(name, needs, sinks, o, out);
    for (index_t h = 0; h < out.rows; ++h) {
      const std::uint64_t at = static_cast<std::uint64_t>(o.layer) << 40 ^ static_cast<std::uint64_t>(h) << 32;
      const auto positions = o.positions[static_cast<std::size_t>(h)];
      for (std::size_t j = 0; j < positions.size(); ++j) {
        const std::uint64_t key = detail::splitmix64(at ^ static_cast<std::uint32_t>(positions[j]));
        out.row(h)[j] = static_cast<float>(detail::splitmix64(seed ^ key) >> 40) * 0x1p-24f;
      }
    }
    detail::raise_sinks(protect, sinks, o, out);
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
