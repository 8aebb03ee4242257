// Version, compiler floors, and the one place that asks which compiler this is.
#pragma once

#define KVEVICT_VERSION_MAJOR 0
#define KVEVICT_VERSION_MINOR 1
#define KVEVICT_VERSION_PATCH 0

// What the library relies on, asked before anything else is read.
#if __cplusplus < 202002L
#error "kvevict needs C++20: compile with -std=c++20"
#include "kvevict needs C++20: compile with -std=c++20"  // no such file: stops before hundreds of further messages
#endif
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error \
    "kvevict reports NaN and compares with infinities, which -ffast-math and -ffinite-math-only remove: compile the \
files that include it with -fno-fast-math (-fno-finite-math-only)"
#endif
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "kvevict needs g++ 12 or newer"
#endif
#if defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 14
#error "kvevict needs clang 14 or newer"
#endif

// The inline namespace that everything lives in. It names the version, whether Highway is used, and every instruction
// set that the compiler may use, so that objects compiled with different settings have different symbols: they may
// stand in one program, and a call from one into the other is a link error, never a wrong body.
#define KVEVICT_ABI_IS_1 ,
#define KVEVICT_ABI_SECOND(first, second, ...) second
#define KVEVICT_ABI_PICK(comma_or_name) KVEVICT_ABI_SECOND(comma_or_name 1, 0, )
#define KVEVICT_ABI_TEST(value) KVEVICT_ABI_PICK(KVEVICT_ABI_IS_##value)
#define KVEVICT_ABI_BIT(macro) KVEVICT_ABI_TEST(macro)  // 1 where the compiler defines `macro` as 1, else 0
#define KVEVICT_ABI_JOIN_(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h
#define KVEVICT_ABI_JOIN(a, b, c, d, e, f, g, h) KVEVICT_ABI_JOIN_(a, b, c, d, e, f, g, h)
// clang-format off
#if defined(__x86_64__) || defined(__i386__)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVEVICT_ABI_LEVEL x86v4_
#elif defined(__AVX2__) && defined(__BMI2__) && defined(__FMA__) && defined(__F16C__)
#define KVEVICT_ABI_LEVEL x86v3_
#elif defined(__SSE4_2__) && defined(__POPCNT__)
#define KVEVICT_ABI_LEVEL x86v2_
#else
#define KVEVICT_ABI_LEVEL x86v1_
#endif
#define KVEVICT_ABI_SET_A KVEVICT_ABI_JOIN(KVEVICT_ABI_BIT(__SSE3__), KVEVICT_ABI_BIT(__SSSE3__), \
  KVEVICT_ABI_BIT(__SSE4_1__), KVEVICT_ABI_BIT(__SSE4_2__), KVEVICT_ABI_BIT(__POPCNT__), KVEVICT_ABI_BIT(__LZCNT__), \
  KVEVICT_ABI_BIT(__AES__), KVEVICT_ABI_BIT(__PCLMUL__))
#define KVEVICT_ABI_SET_B KVEVICT_ABI_JOIN(KVEVICT_ABI_BIT(__AVX__), KVEVICT_ABI_BIT(__AVX2__), \
  KVEVICT_ABI_BIT(__F16C__), KVEVICT_ABI_BIT(__FMA__), KVEVICT_ABI_BIT(__BMI__), KVEVICT_ABI_BIT(__BMI2__), \
  KVEVICT_ABI_BIT(__MOVBE__), KVEVICT_ABI_BIT(__AVXVNNI__))
#define KVEVICT_ABI_SET_C KVEVICT_ABI_JOIN(KVEVICT_ABI_BIT(__AVX512F__), KVEVICT_ABI_BIT(__AVX512BW__), \
  KVEVICT_ABI_BIT(__AVX512CD__), KVEVICT_ABI_BIT(__AVX512DQ__), KVEVICT_ABI_BIT(__AVX512VL__), \
  KVEVICT_ABI_BIT(__AVX512VBMI__), KVEVICT_ABI_BIT(__AVX512VBMI2__), KVEVICT_ABI_BIT(__AVX512IFMA__))
#define KVEVICT_ABI_SET_D KVEVICT_ABI_JOIN(KVEVICT_ABI_BIT(__AVX512VNNI__), KVEVICT_ABI_BIT(__AVX512BITALG__), \
  KVEVICT_ABI_BIT(__AVX512VPOPCNTDQ__), KVEVICT_ABI_BIT(__AVX512BF16__), KVEVICT_ABI_BIT(__AVX512FP16__), \
  KVEVICT_ABI_BIT(__GFNI__), KVEVICT_ABI_BIT(__VAES__), KVEVICT_ABI_BIT(__VPCLMULQDQ__))
#else
#define KVEVICT_ABI_LEVEL cpu_
#define KVEVICT_ABI_SET_A KVEVICT_ABI_JOIN(KVEVICT_ABI_BIT(__ARM_NEON), KVEVICT_ABI_BIT(__ARM_FEATURE_FMA), \
  KVEVICT_ABI_BIT(__ARM_FEATURE_SVE), KVEVICT_ABI_BIT(__ARM_FEATURE_SVE2), KVEVICT_ABI_BIT(__ARM_FEATURE_DOTPROD), \
  KVEVICT_ABI_BIT(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC), KVEVICT_ABI_BIT(__ARM_FEATURE_BF16), \
  KVEVICT_ABI_BIT(__ARM_FEATURE_MATMUL_INT8))
#define KVEVICT_ABI_SET_B KVEVICT_ABI_JOIN(KVEVICT_ABI_BIT(__ARM_FEATURE_CRYPTO), KVEVICT_ABI_BIT(__ARM_FEATURE_AES), \
  KVEVICT_ABI_BIT(__ARM_FEATURE_ATOMICS), KVEVICT_ABI_BIT(__ARM_FEATURE_CRC32), KVEVICT_ABI_BIT(__riscv_vector), \
  KVEVICT_ABI_BIT(__VSX__), 0, 0)
#define KVEVICT_ABI_SET_C
#define KVEVICT_ABI_SET_D
#endif
// clang-format on
#if !defined(KVEVICT_PORTABLE) && __has_include(<hwy/highway.h>)
#define KVEVICT_ABI_PATH _simd
#else
#define KVEVICT_ABI_PATH _portable
#endif
#define KVEVICT_ABI_NAME_(major, minor, level, a, b, c, d, path) v##major##_##minor##_##level##a##b##c##d##path
#define KVEVICT_ABI_NAME(major, minor, level, a, b, c, d, path) KVEVICT_ABI_NAME_(major, minor, level, a, b, c, d, path)
#define KVEVICT_ABI                                                                                    \
  KVEVICT_ABI_NAME(KVEVICT_VERSION_MAJOR, KVEVICT_VERSION_MINOR, KVEVICT_ABI_LEVEL, KVEVICT_ABI_SET_A, \
                   KVEVICT_ABI_SET_B, KVEVICT_ABI_SET_C, KVEVICT_ABI_SET_D, KVEVICT_ABI_PATH)

// HOST_DEVICE: arithmetic that both sides call. DEVICE: kernel bodies, which host tests compile as plain functions.
#if defined(__CUDACC__)
#define KVEVICT_HOST_DEVICE __host__ __device__
#define KVEVICT_DEVICE __device__ __forceinline__
#define KVEVICT_UNROLL _Pragma("unroll")
#define KVEVICT_NO_UNROLL _Pragma("unroll 1")
#else
#define KVEVICT_HOST_DEVICE
#define KVEVICT_DEVICE inline
#define KVEVICT_UNROLL
#define KVEVICT_NO_UNROLL
#endif
