// The thread block of a running kernel, as kernel bodies use it (cta.hpp). Blocks are one-dimensional and a multiple of
// 32 threads.
#pragma once
#include <cstdint>

#include "kvevict/core/half.hpp"
#include "kvevict/cuda/detail/cta.hpp"

namespace kvevict::inline KVEVICT_ABI::cuda {

struct DeviceCta {
  static constexpr unsigned all = 0xffffffffu;

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x & 31u); }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x >> 5); }
  __device__ __forceinline__ int warps() const { return static_cast<int>(blockDim.x >> 5); }
  __device__ __forceinline__ int block_x() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int block_y() const { return static_cast<int>(blockIdx.y); }
  __device__ __forceinline__ int block_z() const { return static_cast<int>(blockIdx.z); }

  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() const { __syncwarp(); }
  __device__ __forceinline__ std::uint32_t ballot(bool p) const { return __ballot_sync(all, p); }
  template <class T>
  __device__ __forceinline__ T shuffle(T v, int from) const {
    return __shfl_sync(all, v, from);
  }
  template <class T>
  __device__ __forceinline__ T shuffle_xor(T v, int mask) const {
    return __shfl_xor_sync(all, v, mask);
  }
  template <class T>
  __device__ __forceinline__ T shuffle_up(T v, int lanes) const {
    return __shfl_up_sync(all, v, static_cast<unsigned>(lanes));
  }

  __device__ __forceinline__ void add(std::uint32_t& counter, std::uint32_t n) const { atomicAdd(&counter, n); }
  __device__ __forceinline__ void add_global(std::uint32_t& counter, std::uint32_t n) const { atomicAdd(&counter, n); }
  __device__ __forceinline__ void smallest_global(unsigned long long& word, unsigned long long n) const {
    atomicMin(&word, n);
  }
  __device__ __forceinline__ void largest_global(std::int32_t& word, std::int32_t n) const { atomicMax(&word, n); }

  // c[4] += a * b of the warp: m16n8k16 on 16-bit elements, m16n8k8 on float32 words read as TF32. Fragments as the
  // PTX manual lays them out; tile.hpp says which row and column they are.
  __device__ __forceinline__ void multiply(fp16_t, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) const {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  __device__ __forceinline__ void multiply(bf16_t, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) const {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  __device__ __forceinline__ void multiply(float, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) const {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  // The compiler must not know what it holds, so that it does not keep what it can compute again.
  __device__ __forceinline__ std::uint32_t opaque(std::uint32_t word) const {
    asm volatile("" : "+r"(word));
    return word;
  }

  // Relative error 2^-22; results below 2^-126 are 0.
  __device__ __forceinline__ float exp2(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ __forceinline__ float log2(float x) const { return log2f(x); }
  __device__ __forceinline__ float sqrt(float x) const { return sqrtf(x); }
  __device__ __forceinline__ float exp(float x) const { return expf(x); }
  __device__ __forceinline__ float log1p(float x) const { return log1pf(x); }
  __device__ __forceinline__ double log(double x) const { return ::log(x); }
  __device__ __forceinline__ double cosine(double x) const { return ::cos(x); }
  __device__ __forceinline__ double sine(double x) const { return ::sin(x); }
};

}  // namespace kvevict::inline KVEVICT_ABI::cuda
