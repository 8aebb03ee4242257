// The one parallel loop. Never uses more threads than asked for, and stays serial inside another loop, so that nested
// calls do not oversubscribe.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/detail/worker_pool.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Threads that a loop of `count` independent items will use.
[[nodiscard]] inline int workers_for(const host_exec& exec, std::int64_t count) {
  if (exec.threads < 1) fail_argument("host_exec: ", exec.threads, " threads; at least 1 is required");
  if (detail::inside_loop()) return 1;
  return static_cast<int>(std::clamp<std::int64_t>(count, 1, exec.threads));
}

// body(i, scratch) for i in [0, count), each i once, in any order. `scratch` is private to a worker: at least
// `scratch_bytes` bytes, 64-byte aligned, unspecified contents. Where bodies throw, the exception of the lowest i is
// rethrown here after all workers have stopped, whatever the number of threads; items behind it may be left out. Works
// in a child after fork() too.
template <class Body>
void parallel_for(const host_exec& exec, std::int64_t count, std::size_t scratch_bytes, Body&& body) {
  if (count <= 0) return;
  const int workers = workers_for(exec, count);
  const std::size_t stride = (scratch_bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
  Arena own;
  std::span<std::byte> memory;
  if (stride != 0) memory = (exec.scratch ? *exec.scratch : own).take(stride * static_cast<std::size_t>(workers));
  const auto item = [&](std::int64_t i, int worker) {
    body(i, memory.subspan(stride * static_cast<std::size_t>(worker), stride));
  };
  if (workers == 1) {
    for (std::int64_t i = 0; i < count; ++i) item(i, 0);
    return;
  }
  using Item = decltype(item);
  detail::ParallelLoop loop{
      [](const void* f, std::int64_t i, int worker) { (*static_cast<const Item*>(f))(i, worker); }, &item, count,
      workers - 1};
  detail::WorkerPool::of_process().run(loop);
}

// The same without working memory: body(i).
template <class Body>
void parallel_for(const host_exec& exec, std::int64_t count, Body&& body) {
  parallel_for(exec, count, 0, [&](std::int64_t i, std::span<std::byte>) { body(i); });
}

}  // namespace kvevict::inline KVEVICT_ABI
