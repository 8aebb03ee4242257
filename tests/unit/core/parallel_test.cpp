#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
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

TEST_CASE("a loop inside a loop stays on its thread") {
  std::atomic<int> most{0};
  parallel_for(host_exec{2, nullptr}, 2, [&](std::int64_t) {
    const int workers = workers_for(host_exec{8, nullptr}, 8);
    most = std::max(most.load(), workers);
  });
#if defined(_OPENMP)
  CHECK(most == 1);
#endif
}
