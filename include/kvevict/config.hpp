// Version, compiler floors, and the one place that asks which compiler this is.
#pragma once

#define KVEVICT_VERSION_MAJOR 0
#define KVEVICT_VERSION_MINOR 1
#define KVEVICT_VERSION_PATCH 0

// The inline namespace that everything lives in. It names version, instruction set, vector path and threading, so that
// objects compiled with different settings have different symbols: they may stand in one program, and a call from one
// into the other is a link error, never a wrong body.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVEVICT_ABI_ISA avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define KVEVICT_ABI_ISA avx2
#else
#define KVEVICT_ABI_ISA base
#endif
#if defined(KVEVICT_PORTABLE)
#define KVEVICT_ABI_PATH portable
#else
#define KVEVICT_ABI_PATH simd
#endif
#if defined(_OPENMP)
#define KVEVICT_ABI_THREADS omp
#else
#define KVEVICT_ABI_THREADS serial
#endif
#define KVEVICT_ABI_JOIN(major, minor, isa, path, threads) v##major##_##minor##_##isa##_##path##_##threads
#define KVEVICT_ABI_EXPAND(major, minor, isa, path, threads) KVEVICT_ABI_JOIN(major, minor, isa, path, threads)
#define KVEVICT_ABI                                                                                   \
  KVEVICT_ABI_EXPAND(KVEVICT_VERSION_MAJOR, KVEVICT_VERSION_MINOR, KVEVICT_ABI_ISA, KVEVICT_ABI_PATH, \
                     KVEVICT_ABI_THREADS)

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

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "kvevict needs g++ 12 or newer"
#endif
#if defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 14
#error "kvevict needs clang 14 or newer"
#endif
