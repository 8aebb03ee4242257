// The threads behind parallel_for. They start when they are first wanted, sleep where no loop follows soon, and end
// with the process. POSIX threads themselves: <thread> and <mutex> would cost every header more to compile than all the
// rest of it.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <utility>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Whether this thread is running items of a loop right now.
inline bool& inside_loop() noexcept {
  static thread_local bool inside = false;
  return inside;
}

// One call of parallel_for. Items are taken in ascending order by whoever is free, so the lowest item that fails always
// runs: which exception the caller sees does not depend on threads.
struct ParallelLoop {
  void (*run)(const void* body, std::int64_t item, int worker);
  const void* body;
  std::int64_t count;
  int helpers;  // threads wanted beside the caller's
  std::atomic<std::int64_t> next{0}, failed{count};
  // Guarded by the pool's mutex.
  std::exception_ptr failure{};  // of item `failed`
  int joined = 0;
  std::atomic<int> active{0};  // changed under the mutex, read without
  ParallelLoop* below = nullptr;
};

class WorkerPool {
  // A sleeping thread takes about 50 us to wake, as long as a small loop; the loops of one plan follow each other
  // faster than this.
  static constexpr std::int64_t patience_ns = 200'000;

 public:
  // The pool of this process. A child after fork() has none of its parent's threads, and whatever they held locked
  // stays locked, so it gets a pool of its own; the memory of the parent's is not given back.
  static WorkerPool& of_process() {
    static std::atomic<WorkerPool*> current{nullptr};
    WorkerPool* pool = current.load(std::memory_order_acquire);
    if (pool && pool->process_ == getpid()) return *pool;
    auto* fresh = new WorkerPool;
    if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was faster
    return *pool;
  }

  // Runs every item, on the calling thread as worker 0 and on up to `helpers` others; fewer where the system gives no
  // more threads. Rethrows what the lowest failing item threw; items behind that one may be left out.
  void run(ParallelLoop& loop) {
    lock();
    loop.below = std::exchange(open_, &loop);
    wanted_ += loop.helpers;
    opened_.fetch_add(1, std::memory_order_relaxed);
    while (threads_ < wanted_ && start_thread()) ++threads_;
    unlock();
    if (loop.helpers == 1) pthread_cond_signal(&work_);
    else pthread_cond_broadcast(&work_);

    work(loop, 0);

    lock();
    ParallelLoop** link = &open_;
    while (*link != &loop) link = &(*link)->below;
    *link = loop.below;  // nobody joins any more
    wanted_ -= loop.helpers;
    unlock();
    if (!soon([&] { return loop.active.load(std::memory_order_acquire) == 0; })) {
      lock();
      while (loop.active.load(std::memory_order_relaxed) != 0) pthread_cond_wait(&done_, &mutex_);
      unlock();
    }
    if (loop.failure) std::rethrow_exception(loop.failure);
  }

 private:
  void lock() noexcept { pthread_mutex_lock(&mutex_); }
  void unlock() noexcept { pthread_mutex_unlock(&mutex_); }

  // Waits a moment, without sleeping, for something to become true.
  template <class Condition>
  static bool soon(Condition&& condition) {
    const auto now = [] {
      timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
    };
    for (const std::int64_t end = now() + patience_ns; !condition(); sched_yield())
      if (now() > end) return false;
    return true;
  }

  void work(ParallelLoop& loop, int worker) noexcept {
    inside_loop() = true;
    for (std::int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) {
      if (i > loop.failed.load(std::memory_order_relaxed)) break;
      try {
        loop.run(loop.body, i, worker);
      } catch (...) {
        lock();
        if (i < loop.failed.load(std::memory_order_relaxed)) {
          loop.failed.store(i, std::memory_order_relaxed);
          loop.failure = std::current_exception();
        }
        unlock();
      }
    }
    inside_loop() = false;
  }

  bool start_thread() noexcept {
    pthread_t thread;
    const auto serve = [](void* pool) -> void* {
      static_cast<WorkerPool*>(pool)->serve();
      return nullptr;
    };
    return pthread_create(&thread, nullptr, serve, this) == 0 && pthread_detach(thread) == 0;
  }

  // What a thread of the pool does all its life.
  void serve() noexcept {
    lock();
    for (bool waited = false;;) {
      if (ParallelLoop* const loop = joinable()) {
        const int worker = ++loop->joined;
        loop->active.fetch_add(1, std::memory_order_relaxed);
        unlock();
        work(*loop, worker);
        lock();
        if (loop->active.fetch_sub(1, std::memory_order_release) == 1) pthread_cond_broadcast(&done_);
        waited = false;
      } else if (waited) {
        pthread_cond_wait(&work_, &mutex_);
      } else {
        const std::uint64_t before = opened_.load(std::memory_order_relaxed);
        unlock();
        soon([&] { return opened_.load(std::memory_order_relaxed) != before; });
        lock();
        waited = true;
      }
    }
  }
  ParallelLoop* joinable() const noexcept {
    ParallelLoop* loop = open_;
    while (loop && loop->joined == loop->helpers) loop = loop->below;
    return loop;
  }

  const pid_t process_ = getpid();
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t work_ = PTHREAD_COND_INITIALIZER, done_ = PTHREAD_COND_INITIALIZER;
  ParallelLoop* open_ = nullptr;          // loops that helpers may join
  int wanted_ = 0, threads_ = 0;          // helpers that the open loops want, threads that exist
  std::atomic<std::uint64_t> opened_{0};  // loops so far
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
