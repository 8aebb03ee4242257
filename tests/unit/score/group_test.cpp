#include "kvevict/score/group.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "kvevict/core/parameters.hpp"
#include "kvevict/core/rows.hpp"

namespace {
using namespace kvevict;
using Row = std::vector<float>;

Row reduced(GroupReduction g, Row rows, index_t heads) {
  const auto tokens = static_cast<index_t>(rows.size()) / heads;
  reduce_group(g, {rows.data(), heads, tokens, tokens});
  if (g != GroupReduction::none) rows.resize(static_cast<std::size_t>(tokens));
  return rows;
}

TEST_CASE("U2: what the query heads of a group add up to is an explicit choice") {
  // Head A likes token 0, head B token 1, both like token 2 a little.
  const Row heads{.75f, 0, .5f, 0, .75f, .5f};
  CHECK(reduced(GroupReduction::mean, heads, 2) == Row{.375f, .375f, .5f});  // keeps token 2
  CHECK(reduced(GroupReduction::max, heads, 2) == Row{.75f, .75f, .5f});     // keeps token 0: a tie with 1
  CHECK(reduced(GroupReduction::sum, heads, 2) == Row{.75f, .75f, 1});
  CHECK(reduced(GroupReduction::none, heads, 2) == heads);
}

TEST_CASE("a group of one changes nothing") {
  for (const auto g : {GroupReduction::none, GroupReduction::mean, GroupReduction::max, GroupReduction::sum})
    CHECK(reduced(g, {3, -1, 2}, 1) == Row{3, -1, 2});
}

TEST_CASE("padded rows: what lies between them is left alone") {
  Row rows{1, 2, -9, 3, 5, -9};
  reduce_group(GroupReduction::sum, {rows.data(), 2, 2, 3});
  CHECK(rows == Row{4, 7, -9, 3, 5, -9});
}

TEST_CASE("the reductions have names") {
  CHECK(print_value(GroupReduction::none) == "none");
  GroupReduction g{};
  CHECK(parse_value("max", g));
  CHECK(g == GroupReduction::max);
  CHECK_FALSE(parse_value("min", g));
  CHECK(is_linear(GroupReduction::mean));
  CHECK(is_linear(GroupReduction::sum));
  CHECK_FALSE(is_linear(GroupReduction::max));
}

}  // namespace
