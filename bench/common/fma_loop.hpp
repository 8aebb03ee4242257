// The multiply-add peak of one core, which every kernel made of products is measured against.
#pragma once
#include "kvevict/cpu/simd.hpp"

#if KVEVICT_SIMD
#include <benchmark/benchmark.h>
#include <hwy/highway.h>

#include <cstdint>

namespace kvevict::bench {

// Multiply-adds of twelve independent chains, `flops` floating-point operations in all.
inline float fma_loop(double flops) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> d;
  constexpr int chains = 12;
  hn::Vec<decltype(d)> c[chains];
  for (int i = 0; i < chains; ++i) {
    float start = static_cast<float>(i);
    benchmark::DoNotOptimize(start);  // chains that begin alike would be computed once
    c[i] = hn::Set(d, start);
  }
  const auto factor = hn::Set(d, 0.999f);
  const auto rounds = static_cast<std::int64_t>(flops / (2. * chains * static_cast<double>(hn::Lanes(d))));
  for (std::int64_t i = 0; i < rounds; ++i)
    for (auto& x : c) x = hn::MulAdd(x, factor, factor);
  float sum = 0;
  for (const auto& x : c) sum += hn::GetLane(hn::SumOfLanes(d, x));
  return sum;
}

}  // namespace kvevict::bench
#endif
