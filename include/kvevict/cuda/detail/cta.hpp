// Cooperation inside a thread block, written once for two machines. Kernel bodies are templates over a `Cta`, which is
// DeviceCta (cta.cuh) in kernels and an emulation with real barriers in the host tests. A Cta has
//   thread() threads() lane() warp() warps() block_x() block_y() block_z()
//   sync()                                   all threads of the block
//   sync_warp() ballot(p) shuffle(v, lane) shuffle_xor(v, mask) shuffle_up(v, n)   all lanes of the warp
//   add(counter, n) add_global(counter, n) smallest_global(word, n) largest_global(word, n)   atomic
//   multiply(tag, c, a, b0, b1)              the warp's matrix product (tile.hpp)
//   opaque(word)                             the word, unknown to the compiler
//   exp2 log2 sqrt exp log1p on float, log cosine sine on double
#pragma once
#include <cstdint>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

inline constexpr int warp_size = 32;
inline constexpr int most_warps = 32;

// Bits of the lanes before `lane`.
KVEVICT_HOST_DEVICE constexpr std::uint32_t lanes_before(int lane) noexcept { return (1u << lane) - 1u; }

KVEVICT_HOST_DEVICE constexpr int count_bits(std::uint32_t x) noexcept { return __builtin_popcount(x); }

template <class Cta, class T>
KVEVICT_DEVICE T warp_sum(Cta& cta, T value) {
  for (int step = 16; step > 0; step /= 2) value += cta.shuffle_xor(value, step);
  return value;
}
template <class Cta, class T>
KVEVICT_DEVICE T warp_max(Cta& cta, T value) {
  for (int step = 16; step > 0; step /= 2) {
    const T other = cta.shuffle_xor(value, step);
    value = value < other ? other : value;
  }
  return value;
}
template <class Cta, class T>
KVEVICT_DEVICE T warp_min(Cta& cta, T value) {
  for (int step = 16; step > 0; step /= 2) {
    const T other = cta.shuffle_xor(value, step);
    value = other < value ? other : value;
  }
  return value;
}

// Working memory of the block-wide operations below. One operation at a time: each ends with a barrier.
struct BlockScratch {
  unsigned long long a[most_warps], b[most_warps];
};

// Sum of the values of lower threads, and of all.
template <class T>
struct Scanned {
  T before, total;
};
template <class Cta, class T>
KVEVICT_DEVICE Scanned<T> block_scan(Cta& cta, T value, BlockScratch& scratch) {
  T inclusive = value;
  for (int step = 1; step < warp_size; step *= 2) {
    const T lower = cta.shuffle_up(inclusive, step);
    if (cta.lane() >= step) inclusive += lower;
  }
  if (cta.lane() == warp_size - 1) scratch.a[cta.warp()] = static_cast<unsigned long long>(inclusive);
  cta.sync();
  const T other = cta.lane() < cta.warps() ? static_cast<T>(scratch.a[cta.lane()]) : T{0};
  const T before = warp_sum(cta, cta.lane() < cta.warp() ? other : T{0});
  const T total = warp_sum(cta, other);
  cta.sync();
  return {before + inclusive - value, total};
}

// Sums of two values over all threads and over the warps before this one. The values are warp totals: the same in
// every lane of a warp.
struct WarpsBefore {
  std::uint32_t a_before, b_before, a_total, b_total;
};
template <class Cta>
KVEVICT_DEVICE WarpsBefore scan_warps(Cta& cta, std::uint32_t a, std::uint32_t b, BlockScratch& scratch) {
  if (cta.lane() == 0) {
    scratch.a[cta.warp()] = a;
    scratch.b[cta.warp()] = b;
  }
  cta.sync();
  const bool in = cta.lane() < cta.warps(), lower = cta.lane() < cta.warp();
  const std::uint32_t x = in ? static_cast<std::uint32_t>(scratch.a[cta.lane()]) : 0u,
                      y = in ? static_cast<std::uint32_t>(scratch.b[cta.lane()]) : 0u;
  const WarpsBefore out{warp_sum(cta, lower ? x : 0u), warp_sum(cta, lower ? y : 0u), warp_sum(cta, x),
                        warp_sum(cta, y)};
  cta.sync();
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI::cuda
