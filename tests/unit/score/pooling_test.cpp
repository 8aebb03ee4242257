#include "kvevict/score/pooling.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {
using namespace kvevict;
using Row = std::vector<float>;

Row pooled(Pooling p, Row row) {
  Row scratch(pool_scratch(p, row.size()));
  pool_row(p, row, scratch);
  return row;
}

TEST_CASE("average pooling counts the zero padding in its divisor, max pooling does not shrink at the edge") {
  CHECK(pooled(Pooling::avg(5), {1, 0, 0, 0, 0, 0}) == Row{.2f, .2f, .2f, 0, 0, 0});
  CHECK(pooled(Pooling::max(5), {1, 0, 0, 0, 0, 0}) == Row{1, 1, 1, 0, 0, 0});
  CHECK(pooled(Pooling::max(3), {-3, -1, -2, -5, -4}) == Row{-1, -1, -1, -2, -4});
  CHECK(pooled(Pooling::avg(3), {3, 6, 9}) == Row{3, 6, 5});
}

TEST_CASE("no pooling and a kernel of one leave the row as it is") {
  const Row row{4, 1, 3};
  CHECK(pooled(Pooling::none(), row) == row);
  CHECK(pooled(Pooling::avg(1), row) == row);
  CHECK(pooled(Pooling::max(1), row) == row);
}

TEST_CASE("rows shorter than the kernel, of one token and of none") {
  CHECK(pooled(Pooling::max(7), {2, 5}) == Row{5, 5});
  CHECK(pooled(Pooling::avg(7), {7, 14}) == Row{3, 3});
  CHECK(pooled(Pooling::avg(1001), {1001, 2002}) == Row{3, 3});
  CHECK(pooled(Pooling::max(3), {6}) == Row{6});
  CHECK(pooled(Pooling::avg(3), {6}) == Row{2});
  CHECK(pooled(Pooling::max(3), {}).empty());
}

TEST_CASE("rows longer than what is pooled at a time have no seam") {
  for (const std::size_t n : {511u, 512u, 513u, 1024u, 1300u}) {
    Row row(n);
    for (std::size_t j = 0; j < n; ++j) row[j] = static_cast<float>((j * 7919) % 1009);
    for (const index_t kernel : {3, 7, 1025}) {
      const auto reach = static_cast<std::size_t>(kernel / 2);
      Row largest(n), mean(n);
      for (std::size_t j = 0; j < n; ++j) {
        float sum = 0, most = -std::numeric_limits<float>::infinity();
        for (std::size_t i = j < reach ? 0 : j - reach; i < std::min(n, j + reach + 1); ++i) {
          sum += row[i];  // integers below 2^24: exact in any order
          most = std::max(most, row[i]);
        }
        largest[j] = most;
        mean[j] = sum / static_cast<float>(kernel);
      }
      CHECK(pooled(Pooling::max(kernel), row) == largest);
      CHECK(pooled(Pooling::avg(kernel), row) == mean);
    }
  }
}

TEST_CASE("minus infinity stays where nothing better is near") {
  const float none = -std::numeric_limits<float>::infinity();
  CHECK(pooled(Pooling::max(3), {none, none, none, 1}) == Row{none, none, 1, 1});
}

TEST_CASE("a pooling is printed and read back") {
  for (const Pooling p : {Pooling::none(), Pooling::avg(5), Pooling::max(7), Pooling::max(1)}) {
    Pooling back = Pooling::avg(99);
    REQUIRE(parse_value(print_value(p), back));
    CHECK(back == p);
  }
  CHECK(print_value(Pooling::max(7)) == "max:7");
  CHECK(print_value(Pooling::avg(5)) == "avg:5");
  CHECK(print_value(Pooling{}) == "none");
  Pooling p = Pooling::avg(3);
  for (const char* text : {"", "max", "max:", "min:3", "max:7x", "max: 7", "avg:3.5", "7", "none:3"})
    CHECK_FALSE(parse_value(text, p));
  CHECK(p == Pooling::avg(3));
}

TEST_CASE("even and non-positive kernels are refused") {
  Pooling p;
  CHECK_THROWS_WITH_AS(parse_value("max:4", p), "pool=max:4: the kernel must be odd and at least 1",
                       std::invalid_argument);
  CHECK_THROWS_AS(parse_value("avg:0", p), std::invalid_argument);
  CHECK_THROWS_AS(parse_value("avg:-3", p), std::invalid_argument);
  CHECK_THROWS_AS(check_pooling(Pooling::avg(2)), std::invalid_argument);
  CHECK_THROWS_AS(pooled(Pooling::max(2), {1, 2}), std::invalid_argument);
}

}  // namespace
