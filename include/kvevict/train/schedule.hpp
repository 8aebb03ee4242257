// What changes from step to step while LKV trains (arXiv 2605.06676): temperature and retention shrink exponentially,
// the learning rate rises over a warm-up and then falls linearly.
#pragma once

#include <cmath>
#include <cstdint>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

// from * (to / from)^(step / steps), steps counted from 0.
struct ExponentialSchedule {
  double from = 1, to = 1;
  double at(std::int64_t step, std::int64_t steps) const {
    return from * std::pow(to / from, static_cast<double>(step) / static_cast<double>(steps));
  }
};

// from to `to` on a line over all steps, scaled by (step + 1) / warm_up in the first warm_up steps.
struct LinearWarmUpSchedule {
  double from = 1e-3, to = 1e-4;
  std::int64_t warm_up = 0;
  double at(std::int64_t step, std::int64_t steps) const {
    const double x = from + (to - from) * static_cast<double>(step) / static_cast<double>(steps);
    return step < warm_up ? x * static_cast<double>(step + 1) / static_cast<double>(warm_up) : x;
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
