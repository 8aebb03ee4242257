// The one door to Highway, used with static dispatch: the instruction set is the one that the translation unit is
// compiled for. KVEVICT_SIMD is 1 where Highway is found and has a fixed-width vector target; code that uses it has a
// portable twin for the other case. KVEVICT_PORTABLE, defined by the user, forces that twin.
// Objects compiled for different ones may stand in one program: KVEVICT_ABI keeps their symbols apart.
#pragma once

#if !defined(KVEVICT_PORTABLE) && __has_include(<hwy/highway.h>)
#if !defined(HWY_COMPILE_ONLY_STATIC)
#define HWY_COMPILE_ONLY_STATIC  // Highway 1.0.3 does not compile without it for new processors
#endif
#if !defined(HWY_IS_DEBUG_BUILD)
#define HWY_IS_DEBUG_BUILD 0  // its assertions would need libhwy, and only its headers are used
#endif
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "kvevict/config.hpp"
#if HWY_HAVE_SCALABLE || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
#define KVEVICT_SIMD 0
#else
#define KVEVICT_SIMD 1
#endif
#else
#define KVEVICT_SIMD 0
#endif

namespace kvevict::inline KVEVICT_ABI {

// The instruction set in use, for reports and tests: "portable" or Highway's name of the target.
constexpr const char* simd_target() noexcept {
#if KVEVICT_SIMD
#if HWY_TARGET == HWY_AVX2
  return "AVX2";
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return "AVX-512";
#elif HWY_TARGET == HWY_NEON
  return "NEON";
#elif HWY_TARGET == HWY_SSE4
  return "SSE4";
#elif HWY_TARGET == HWY_SSSE3
  return "SSSE3";
#else
  return "other";
#endif
#else
  return "portable";
#endif
}

}  // namespace kvevict::inline KVEVICT_ABI
