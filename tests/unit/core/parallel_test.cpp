#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kvevict/core/parallel.hpp"

using namespace kvevict;

TEST_CASE("every item runs once, whatever the number of threads") {
  for (const int threads : {1, 2, 7}) {
    std::vector<int> hits(100, 0);
    parallel_for(host_exec{threads, nullptr}, 100, [&](std::int64_t i) { ++hits[static_cast<std::size_t>(i)]; });
    CHECK(hits == std::vector<int>(100, 1));
  }
  parallel_for(host_exec{}, 0, [](std::int64_t) { FAIL("no item, no call"); });
}

TEST_CASE("working memory is private, aligned and large enough") {
  Arena arena;
  for (Arena* scratch : {static_cast<Arena*>(nullptr), &arena}) {
    std::atomic<int> bad{0};
    parallel_for(host_exec{4, scratch}, 64, 100, [&](std::int64_t i, std::span<std::byte> own) {
      if (own.size() < 100 || reinterpret_cast<std::uintptr_t>(own.data()) % Arena::alignment != 0) ++bad;
      for (std::byte& b : own) b = static_cast<std::byte>(i);
      for (const std::byte b : own)
        if (b != static_cast<std::byte>(i)) ++bad;
    });
    CHECK(bad == 0);
  }
  CHECK(arena.bytes() >= 100);
}

TEST_CASE("an arena sized beforehand is not grown, and keeps its memory between calls") {
  Arena arena(4096);
  const auto* first = arena.take(4096).data();
  CHECK(arena.take(100).data() == first);
  CHECK(arena.bytes() == 4096);
}

TEST_CASE("the exception of a body reaches the caller") {
  for (const int threads : {1, 3})
    CHECK_THROWS_WITH_AS(parallel_for(host_exec{threads, nullptr}, 10,
                                      [](std::int64_t i) {
                                        if (i == 4) throw std::runtime_error("item 4");
                                      }),
                         "item 4", std::runtime_error);
  CHECK_THROWS_AS(parallel_for(host_exec{0, nullptr}, 1, [](std::int64_t) {}), std::invalid_argument);
}

TEST_CASE("of several exceptions the caller sees the lowest item's, whatever the number of threads") {
  for (const int threads : {1, 2, 7})
    for (int round = 0; round < 50; ++round)
      CHECK_THROWS_WITH_AS(parallel_for(host_exec{threads, nullptr}, 64,
                                        [](std::int64_t i) {
                                          if (i % 7 == 3) throw std::runtime_error("item " + std::to_string(i));
                                        }),
                           "item 3", std::runtime_error);
}

TEST_CASE("a loop inside a loop stays on its thread") {
  std::atomic<int> max{0};
  parallel_for(host_exec{2, nullptr}, 2, [&](std::int64_t) {
    const int workers = workers_for(host_exec{8, nullptr}, 8);
    max = std::max(max.load(), workers);
  });
  CHECK(max == 1);
  CHECK(workers_for(host_exec{8, nullptr}, 8) == 8);
}

TEST_CASE("loops of several threads run at once") {
  std::vector<std::thread> callers;
  std::atomic<int> items{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) parallel_for(host_exec{3, nullptr}, 20, [&](std::int64_t) { ++items; });
    });
  for (auto& caller : callers) caller.join();
  CHECK(items == 4 * 50 * 20);
}

#if !defined(__SANITIZE_THREAD__)  // which starts no threads after fork
TEST_CASE("a child after fork has threads of its own") {
  std::atomic<int> items{0};
  const auto loop = [&] { parallel_for(host_exec{4, nullptr}, 100, [&](std::int64_t) { ++items; }); };
  loop();  // the parent's threads exist
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(60);  // a hang becomes a failure
    loop();
    _exit(items == 200 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif
