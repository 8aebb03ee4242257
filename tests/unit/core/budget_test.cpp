#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "kvevict/core/budget.hpp"

using namespace kvevict;

namespace {

GrantedBudget resolve(const Budget& budget, const std::vector<index_t>& tokens, index_t minimum = 1,
                      std::int64_t row_bytes = 256) {
  Audit audit;
  return budget.resolve(tokens, row_bytes, minimum, audit);
}

}  // namespace

TEST_CASE("U16: 0.29 of 100 rows is 29, where a double floor gives 28") {
  CHECK(resolve(Budget::retain(0.29), {100}).total == 29);
  CHECK(resolve(Budget::retain(0.57), {100}).total == 57);
  CHECK(resolve(Budget::retain(0.1), {1000}).total == 100);
  // Every hundredth of every length up to 300, against integer arithmetic.
  for (int percent = 1; percent <= 100; ++percent)
    for (index_t t = 1; t <= 300; ++t)
      if (resolve(Budget::retain(percent / 100.0), {t}, 0).total != percent * t / 100) FAIL(percent, " % of ", t);
}

TEST_CASE("U16: rows to bytes to rows is the identity") {
  for (std::int64_t n = 1; n <= 300; ++n) {
    const auto rows = resolve(Budget::rows(n), std::vector<index_t>(6, 400)).total;
    CHECK(rows == 6 * n);
    CHECK(resolve(Budget::bytes(rows * 256), std::vector<index_t>(6, 400)).total == rows);
  }
}

TEST_CASE("U8: a ratio resolves to at least one row per head and says so") {
  Audit audit;
  const std::vector<index_t> tokens{10, 10, 10};
  const auto granted = Budget::retain(0.04).resolve(tokens, 256, 1, audit);
  CHECK(granted.total == 3);
  CHECK(granted.full == 30);
  REQUIRE(audit.entries().size() == 1);
  CHECK(audit.entries()[0] == "budget raised from 1 to 3 rows: at least 1 per head");
  CHECK(resolve(Budget::retain(0.5), {1}).total == 1);
  CHECK(resolve(Budget::retain(0.5), {2}).total == 1);
  CHECK(resolve(Budget::retain(0.04), tokens, 0).total == 1);  // empty heads legal: nothing is raised
  CHECK(resolve(Budget::retain(0.1), {0, 0, 4}).total == 1);   // heads without tokens need no row
}

TEST_CASE("U8: rows or bytes below the minimum are an error that names it") {
  CHECK_THROWS_WITH_AS(resolve(Budget::rows(0), {10}), doctest::Contains("the minimum is 1"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(resolve(Budget::bytes(255), {10}), doctest::Contains("the minimum is 256 bytes"),
                       std::invalid_argument);
  CHECK_THROWS_AS(resolve(Budget::bytes(-1), {10}, 0), std::invalid_argument);
  CHECK(resolve(Budget::rows(0), {10}, 0).total == 0);
}

TEST_CASE("a budget above what is there is what is there") {
  CHECK(resolve(Budget::retain(1), {7, 5}).total == 12);
  CHECK(resolve(Budget::rows(100), {7, 5}).total == 12);
  CHECK(resolve(Budget::rows(6), {7, 5}).total == 12);
  CHECK(resolve(Budget::rows(std::numeric_limits<index_t>::max()), {7, 5}).total == 12);
  CHECK(resolve(Budget::bytes(std::numeric_limits<std::int64_t>::max()), {7, 5}).total == 12);
}

TEST_CASE("only ratios in (0, 1] are ratios") {
  for (const double bad :
       {0.0, -0.1, 1.0000011, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    CHECK_THROWS_AS(Budget::retain(bad), std::invalid_argument);
  CHECK_THROWS_AS(Budget::rows(-1), std::invalid_argument);
  CHECK(Budget::retain(1e-9).description() == "retain 1e-09");  // the nearest multiple of 1e-6 that keeps anything
}

TEST_CASE("totals stay exact beyond 2^31 rows") {
  const std::vector<index_t> tokens(2048, 2'000'000);  // 4.096e9 rows
  CHECK(resolve(Budget::retain(0.15), tokens).total == 614'400'000);
  CHECK(scaled_floor(std::int64_t{1} << 62, 3, 4) == (std::int64_t{3} << 60));
}
