#include <doctest/doctest.h>

#include "kvevict/core/protect.hpp"

using namespace kvevict;

namespace {
template <class Rows>
void check(const Rows& got, index_t sinks, index_t newest) {
  CHECK(got.sinks == sinks);
  CHECK(got.newest == newest);
}
}  // namespace

TEST_CASE("U48: sinks 4 and window 32 are kept whole with 72 rows, and by half with 36") {
  check(protect_within(protect_asked({4, 32}, 512), 72), 4, 32);
  check(protect_within(protect_asked({4, 32}, 512), 36), 4, 14);
}

TEST_CASE("U43: sinks 4 in a budget of 4: two are protected") {
  check(protect_within(protect_asked({4, 0}, 100), 4), 2, 0);
}

TEST_CASE("U17: on 16 tokens a window of 32 is 8 rows, and a budget of 8 protects the newest 4") {
  CHECK(window_rows_used(32, 16) == 8);
  check(protect_asked({0, 32}, 16), 0, 8);
  check(protect_within(protect_asked({0, 32}, 16), 8), 0, 4);
}

TEST_CASE("U10: a window of 0 protects nothing, also on short prompts") {
  check(protect_asked({0, 0}, 8), 0, 0);
  CHECK(window_rows_used(32, 1) == 1);
  CHECK(window_rows_used(32, 0) == 1);
}

TEST_CASE("half rounds up, full does not cut, score has no range") {
  check(protect_within(protect_asked({0, 32}, 512), 25), 0, 13);
  check(protect_within(protect_asked({0, 32, ProtectShare::full}, 512), 25), 0, 25);
  check(protect_within(protect_asked({0, 32, ProtectShare::full}, 512), 40), 0, 32);
  check(protect_within(protect_asked({4, 32, ProtectShare::score}, 512), 25), 0, 0);
}

TEST_CASE("sinks and window never overlap") {
  check(protect_asked({4, 32}, 6), 4, 2);
  check(protect_asked({8, 32}, 6), 6, 0);
}
