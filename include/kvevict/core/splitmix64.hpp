// The one source of arbitrary bits: scores of `random`, training noise, fingerprints.
#pragma once
#include <cstdint>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// One step of SplitMix64 (Steele, Lea, Flood, 2014) from state x.
KVEVICT_HOST_DEVICE constexpr std::uint64_t splitmix64(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
