// The one parallel loop: OpenMP where it is compiled in, serial otherwise. Never uses more threads than asked for, and
// stays serial inside another parallel region, so that nested calls do not oversubscribe.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Threads that a loop of `count` independent items will use.
inline int workers_for(const host_exec& exec, std::int64_t count) {
  if (exec.threads < 1) fail_argument("host_exec: ", exec.threads, " threads; at least 1 is required");
#if defined(_OPENMP)
  if (omp_in_parallel()) return 1;
  return static_cast<int>(std::clamp<std::int64_t>(count, 1, exec.threads));
#else
  (void)count;
  return 1;
#endif
}

// body(i, scratch) for i in [0, count), each i once, in any order. `scratch` is private to a worker: at least
// `scratch_bytes` bytes, 64-byte aligned, unspecified contents. Where bodies throw, the exception of the lowest i is
// rethrown after all workers have stopped, whatever their number: items above a failed one are skipped, those below it
// still run.
template <class Body>
void parallel_for(const host_exec& exec, std::int64_t count, std::size_t scratch_bytes, Body&& body) {
  if (count <= 0) return;
  const int workers = workers_for(exec, count);
  const std::size_t stride = (scratch_bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
  Arena own;
  std::span<std::byte> memory;
  if (stride != 0) memory = (exec.scratch ? *exec.scratch : own).take(stride * static_cast<std::size_t>(workers));
#if defined(_OPENMP)
  if (workers > 1) {
    std::exception_ptr failure;
    std::atomic<std::int64_t> failed{count};  // the lowest item that threw
#pragma omp parallel for schedule(dynamic, 1) num_threads(workers)
    for (std::int64_t i = 0; i < count; ++i) {
      if (i > failed.load(std::memory_order_relaxed)) continue;
      try {
        body(i, memory.subspan(stride * static_cast<std::size_t>(omp_get_thread_num()), stride));
      } catch (...) {
#pragma omp critical(kvevict_parallel_for)
        if (i < failed.load(std::memory_order_relaxed)) {
          failure = std::current_exception();
          failed.store(i, std::memory_order_relaxed);
        }
      }
    }
    if (failure) std::rethrow_exception(failure);
    return;
  }
#endif
  for (std::int64_t i = 0; i < count; ++i) body(i, memory.subspan(0, stride));
}

// The same without working memory: body(i).
template <class Body>
void parallel_for(const host_exec& exec, std::int64_t count, Body&& body) {
  parallel_for(exec, count, 0, [&](std::int64_t i, std::span<std::byte>) { body(i); });
}

}  // namespace kvevict::inline KVEVICT_ABI
