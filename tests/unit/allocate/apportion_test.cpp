#include "kvevict/allocate/apportion.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

using namespace kvevict;
using Rows64 = std::vector<std::int64_t>;

TEST_CASE("halves round to the even neighbour") {
  CHECK(round_half_even(-0.5) == 0);
  CHECK(round_half_even(0.5) == 0);
  CHECK(round_half_even(1.5) == 2);
  CHECK(round_half_even(2.5) == 2);
  CHECK(round_half_even(-1.5) == -2);
  CHECK(round_half_even(2.5000001) == 3);
  CHECK(round_half_even(-2.25) == -2);
  CHECK(round_half_even(7.0) == 7);
}

TEST_CASE("U8: kvpress keeps at least one row where its product truncates to none") {
  CHECK(rows_as_kvpress(10, 0.1) == 1);     // int(10 * (1 - 0.9)) = 0
  CHECK(rows_as_kvpress(1000, 0.1) == 99);  // 99.99999999999998
  CHECK(rows_as_kvpress(1, 0.5) == 1);
  CHECK(rows_as_kvpress(0, 0.5) == 0);
}

TEST_CASE("exact floors of a total") {
  CHECK(exact_floors(Rows64{1, 2, 3}, 10) == Rows64{1, 3, 5});
  CHECK(exact_floors(Rows64{0, 0}, 10) == Rows64{0, 0});
  const std::int64_t big = std::int64_t{1} << 60;  // total * weight needs more than 64 bits
  CHECK(exact_floors(Rows64{big, big}, big - 1) == Rows64{big / 2 - 1, big / 2 - 1});
}

TEST_CASE("largest remainder: equal fractions go to the lower index") {
  CHECK(largest_remainder(Rows64{1, 1, 1, 1}, 6) == Rows64{2, 2, 1, 1});
  CHECK(largest_remainder(Rows64{5, 3, 2}, 7) == Rows64{4, 2, 1});  // 3.5 2.1 1.4
  CHECK(largest_remainder(Rows64{0, 0, 0}, 4) == Rows64{2, 1, 1});
  CHECK(largest_remainder(std::vector<double>{0.1, 0.1, 0.1}, 10) == Rows64{4, 3, 3});
  CHECK(largest_remainder(std::vector<double>{1e300, 1e-300}, 3) == Rows64{3, 0});
  CHECK(largest_remainder(Rows64{}, 3).empty());
}

TEST_CASE("largest remainder: what a cap cuts off goes to the others in proportion") {
  // 97 % of 100 is cut to 50; the other 50 are split 1 : 1 : 1.
  CHECK(largest_remainder(Rows64{1, 1, 1, 97}, 100, Rows64{50, 50, 50, 50}) == Rows64{17, 17, 16, 50});
  CHECK(largest_remainder(Rows64{8, 1, 1}, 20, Rows64{4, 9, 9}) == Rows64{4, 8, 8});
  CHECK(largest_remainder(Rows64{8, 4, 1}, 20, Rows64{4, 9, 9}) == Rows64{4, 9, 7});  // the second cut follows
  CHECK(largest_remainder(Rows64{1, 1}, 100, Rows64{3, 4}) == Rows64{3, 4});
  CHECK(largest_remainder(Rows64{1, 0, 0}, 9, Rows64{3, 9, 9}) == Rows64{3, 3, 3});
}

TEST_CASE("largest remainder refuses weights that are none") {
  CHECK_THROWS_AS(largest_remainder(Rows64{1, -1}, 4), std::invalid_argument);
  CHECK_THROWS_AS(largest_remainder(Rows64{1, 1}, -4), std::invalid_argument);
  CHECK_THROWS_AS(largest_remainder(Rows64{1, 1}, 4, Rows64{1}), std::invalid_argument);
  CHECK_THROWS_AS(largest_remainder(std::vector<double>{1, std::numeric_limits<double>::quiet_NaN()}, 4),
                  std::invalid_argument);
}

TEST_CASE("largest remainder sums to the total and stays within one of each quota and under each cap") {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    Rows64 weights(1 + random() % 40), caps(weights.size());
    for (auto& w : weights) w = static_cast<std::int64_t>(random() % 1000);
    for (auto& c : caps) c = static_cast<std::int64_t>(random() % 100);
    weights[0] = 1;
    const auto total = static_cast<std::int64_t>(random() % 2000);
    const auto sum = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    const auto free = largest_remainder(weights, total);
    CHECK(std::accumulate(free.begin(), free.end(), std::int64_t{0}) == total);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      CHECK(free[i] >= total * weights[i] / sum);
      CHECK(free[i] <= (total * weights[i] + sum - 1) / sum);
    }
    const auto capped = largest_remainder(weights, total, caps);
    const auto room = std::accumulate(caps.begin(), caps.end(), std::int64_t{0});
    CHECK(std::accumulate(capped.begin(), capped.end(), std::int64_t{0}) == std::min(total, room));
    for (std::size_t i = 0; i < caps.size(); ++i) CHECK(capped[i] <= caps[i]);
  }
}

TEST_CASE("raising to a minimum costs the largest part, ties the lower index, and only where the total is exceeded") {
  Rows64 rows{5, 5, 0, 0};
  raise_to_minimum(rows, Rows64{1, 1, 1, 1}, 10);
  CHECK(rows == Rows64{4, 4, 1, 1});
  rows = {5, 5, 0};
  raise_to_minimum(rows, Rows64{1, 1, 1}, 10);
  CHECK(rows == Rows64{4, 5, 1});
  rows = {5, 4, 0};
  raise_to_minimum(rows, Rows64{1, 1, 1}, 10);  // 9 rows of 10: one is free
  CHECK(rows == Rows64{5, 4, 1});
  rows = {5, 2, 0};
  raise_to_minimum(rows, Rows64{5, 1, 1}, 7);  // the first part may not fall below its own minimum
  CHECK(rows == Rows64{5, 1, 1});
  CHECK_THROWS_AS(raise_to_minimum(rows, Rows64{5, 1, 2}, 7), std::invalid_argument);
}
