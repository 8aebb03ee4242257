#include "kvevict/allocate/uniform.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "kvevict/allocate/full.hpp"

using namespace kvevict;

static_assert(StaticAllocator<allocate::Uniform> && StaticAllocator<allocate::Full> &&
              !LayerAllocator<allocate::Uniform>);

namespace {
template <class A>
std::vector<index_t> rows_of(const A& allocator, index_t layers, std::vector<index_t> tokens, const Budget& budget) {
  const CacheShape shape{layers, static_cast<index_t>(tokens.size()) / layers, 8, 4, 4};
  Audit audit;
  const GrantedBudget granted = budget.resolve(tokens, 16, allocator.minimum_rows, audit);
  std::vector<index_t> out(tokens.size(), -1);
  allocator.allocate(shape, tokens, granted, {out.data(), layers, shape.kv_heads, shape.kv_heads}, audit);
  return out;
}
using V = std::vector<index_t>;
}  // namespace

TEST_CASE("uniform floors per head, exact=true hands out the rest") {
  // 0.15 of 4 * 25 rows is 15; each head's share is 3.75.
  CHECK(rows_of(allocate::Uniform{}, 2, V(4, 25), Budget::retain(0.15)) == V{3, 3, 3, 3});
  CHECK(rows_of(allocate::Uniform{true}, 2, V(4, 25), Budget::retain(0.15)) == V{4, 4, 4, 3});
  CHECK(rows_of(allocate::Uniform{}, 2, {10, 20, 30, 40}, Budget::retain(0.25)) == V{2, 5, 7, 10});
  CHECK(rows_of(allocate::Uniform{true}, 2, {10, 20, 30, 40}, Budget::retain(0.25)) == V{3, 5, 7, 10});
}

TEST_CASE("uniform: a short head keeps one row at the cost of the longest") {
  CHECK(rows_of(allocate::Uniform{}, 1, {1, 1, 98}, Budget::retain(0.1)) == V{1, 1, 8});  // 0 0 9 of 10
  CHECK(rows_of(allocate::Uniform{}, 1, {2, 2, 96}, Budget::retain(0.03)) == V{1, 1, 1});
  CHECK(rows_of(allocate::Uniform{}, 1, {0, 4, 0}, Budget::retain(0.5)) == V{0, 2, 0});
  CHECK(rows_of(allocate::Uniform{}, 1, {0, 0, 0}, Budget::retain(0.5)) == V{0, 0, 0});
}

TEST_CASE("U8: short prompts keep at least one row") {
  CHECK(rows_of(allocate::Uniform{}, 1, {1}, Budget::retain(0.5)) == V{1});
  CHECK(rows_of(allocate::Uniform{}, 1, {2}, Budget::retain(0.5)) == V{1});
  CHECK(rows_of(allocate::Uniform{}, 1, {10}, Budget::retain(0.1)) == V{1});
  CHECK(rows_of(allocate::Uniform{}, 1, {1000}, Budget::retain(0.1)) == V{100});
  CHECK_THROWS_AS(rows_of(allocate::Uniform{}, 1, {10}, Budget::rows(0)), std::invalid_argument);
}

TEST_CASE("uniform: kvpress rounding follows its double arithmetic and needs a ratio") {
  const allocate::Uniform kvpress{false, UniformRounding::kvpress};
  CHECK(rows_of(kvpress, 1, {1000, 100, 10}, Budget::retain(0.1)) == V{99, 9, 1});
  CHECK(rows_of(allocate::Uniform{}, 1, {1000, 100, 10}, Budget::retain(0.1)) == V{100, 10, 1});
  CHECK(rows_of(kvpress, 1, {7, 9}, Budget::retain(1)) == V{7, 9});
  CHECK_THROWS_AS(rows_of(kvpress, 1, {100}, Budget::rows(10)), std::invalid_argument);
  CHECK_THROWS_AS(rows_of(kvpress, 1, {100}, Budget::bytes(160)), std::invalid_argument);
  CHECK_THROWS_AS(rows_of(allocate::Uniform{true, UniformRounding::kvpress}, 1, {100}, Budget::retain(0.5)),
                  std::invalid_argument);
}

TEST_CASE("U16: rows to bytes to rows is the identity, and 0.29 of 100 rows is 29") {
  for (index_t n = 1; n <= 300; ++n) {
    const V tokens(4, 300);
    CHECK(rows_of(allocate::Uniform{}, 2, tokens, Budget::rows(n)) == V(4, n));
    CHECK(rows_of(allocate::Uniform{}, 2, tokens, Budget::bytes(std::int64_t{n} * 4 * 16)) == V(4, n));
  }
  CHECK(rows_of(allocate::Uniform{}, 1, {100}, Budget::retain(0.29)) == V{29});
}

TEST_CASE("uniform never keeps more than the total or than a head holds, and permutes with the heads") {
  for (index_t seed = 1; seed < 40; ++seed) {
    V tokens;
    for (index_t h = 0; h < 8; ++h) tokens.push_back((seed * 37 + h * 53) % 61);
    const auto full = std::accumulate(tokens.begin(), tokens.end(), 0);
    for (const double retain : {0.05, 0.3, 0.77, 1.0}) {
      Audit audit;
      const auto total = Budget::retain(retain).resolve(tokens, 1, 1, audit).total;
      for (const bool exact : {false, true}) {
        const V rows = rows_of(allocate::Uniform{exact}, 2, tokens, Budget::retain(retain));
        const auto sum = std::accumulate(rows.begin(), rows.end(), 0);
        CHECK(sum <= total);
        if (exact) CHECK(sum == total);
        if (retain == 1.0) CHECK(sum == full);
        for (std::size_t h = 0; h < tokens.size(); ++h) {
          CHECK(rows[h] <= tokens[h]);
          CHECK(rows[h] >= std::min(tokens[h], 1));
        }
      }
    }
  }
  CHECK(rows_of(allocate::Uniform{}, 1, {40, 10, 30}, Budget::retain(0.25)) == V{10, 2, 7});
  CHECK(rows_of(allocate::Uniform{}, 1, {30, 40, 10}, Budget::retain(0.25)) == V{7, 10, 2});
}

TEST_CASE("full keeps everything and says that the budget was not met") {
  Audit audit;
  const V tokens{5, 0, 7};
  const auto granted = Budget::retain(0.1).resolve(tokens, 1, allocate::Full::minimum_rows, audit);
  V out(3, -1);
  allocate::Full{}.allocate({1, 3, 3, 4, 4}, tokens, granted, {out.data(), 1, 3, 3}, audit);
  CHECK(out == tokens);
  CHECK(audit.entries().size() == 1);
}
