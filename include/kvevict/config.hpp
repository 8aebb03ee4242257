// Version, compiler floors, and the one place that asks which compiler this is.
#pragma once

#define KVEVICT_VERSION_MAJOR 0
#define KVEVICT_VERSION_MINOR 1
#define KVEVICT_VERSION_PATCH 0

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
