#include "kvevict/allocate/pyramid.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvevict;

static_assert(StaticAllocator<allocate::Pyramid> && !LayerAllocator<allocate::Pyramid>);

namespace {
using V = std::vector<index_t>;

struct Result {
  V rows;
  Audit audit;
  bool says(const std::string& what) const {
    for (const auto& e : audit.entries())
      if (e.find(what) != std::string::npos) return true;
    return false;
  }
  std::int64_t sum() const { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }
};

Result run(const allocate::Pyramid& pyramid, index_t layers, V tokens, const Budget& budget) {
  const CacheShape shape{layers, static_cast<index_t>(tokens.size()) / layers, 8, 4, 4};
  Result out;
  const GrantedBudget granted = budget.resolve(tokens, 16, pyramid.minimum_rows, out.audit);
  out.rows.assign(tokens.size(), -1);
  pyramid.allocate(shape, tokens, granted, {out.rows.data(), layers, shape.kv_heads, shape.kv_heads}, out.audit);
  return out;
}
}  // namespace

TEST_CASE("pyramid: a line from 2m - m / beta down to m / beta, all heads of a layer equal") {
  // m = 40, beta = 4: hi = 70, lo = 10, steps of 20.
  const auto r = run({4}, 4, V(8, 1000), Budget::rows(40));
  CHECK(r.rows == V{70, 70, 50, 50, 30, 30, 10, 10});
  CHECK(r.audit.entries().empty());
  CHECK(run({20}, 4, V(8, 1000), Budget::rows(40)).rows == V{78, 78, 53, 53, 27, 27, 2, 2});  // 78 52.67 27.33 2
}

TEST_CASE("pyramid: clipped at the rows there are, what is cut goes to the upper layers") {
  // m = 40, hi = 70 > t = 60: hi = 60, lo = 20, steps of 40 / 3.
  CHECK(run({4}, 4, V(4, 60), Budget::rows(40)).rows == V{60, 47, 33, 20});
}

TEST_CASE("U9: one layer is uniform, and every layer keeps a row") {
  const auto one = run({20}, 1, V(2, 100), Budget::rows(30));
  CHECK(one.rows == V{30, 30});
  CHECK(one.says("degenerated to uniform"));
  const auto steep = run({20}, 32, V(32, 100), Budget::retain(0.04));
  CHECK(steep.sum() == 32 * 4);
  for (const index_t r : steep.rows) CHECK(r >= 1);
  const auto least = run({20}, 32, V(32, 10), Budget::retain(0.04));
  CHECK(least.rows == V(32, 1));
  CHECK(least.says("budget raised"));
  CHECK_THROWS_AS(run({20}, 32, V(32, 10), Budget::rows(0)), std::invalid_argument);
}

TEST_CASE("pyramid: a layer below one row is raised at the cost of the largest") {
  // m = 2, beta = 20: 3.9 2.63 1.37 0.1 -> 4 3 1 0 -> the last is raised, the first pays.
  CHECK(run({20}, 4, V(4, 100), Budget::rows(2)).rows == V{3, 3, 1, 1});
}

TEST_CASE("U11: a flat result is said, a budget near the prompt keeps its shape") {
  const auto shaped = run({20}, 4, V(4, 150), Budget::rows(100));  // hi = 150, lo = 50
  CHECK(shaped.rows == V{150, 117, 83, 50});
  CHECK(shaped.audit.entries().empty());
  const auto flat = run({1}, 4, V(4, 150), Budget::rows(100));
  CHECK(flat.rows == V(4, 100));
  CHECK(flat.says("degenerated to uniform"));
}

TEST_CASE("U12: the sum is layers times the average; reference rounding overspends and says so") {
  for (const index_t mean : {1, 2, 7, 64, 333}) {
    const auto r = run({4}, 32, V(32, 4096), Budget::rows(mean));
    CHECK(r.sum() == 32 * mean);
  }
  // 64 rows beside a window of 32, 32 layers: hi = 125, lo = 3, step 3; 78.5 rows on average instead of 64: +22.7 %.
  const auto reference = run({20, PyramidRounding::reference, 32}, 32, V(32, 8192), Budget::rows(96));
  CHECK(reference.rows[0] == 125 + 32);
  CHECK(reference.rows[31] == 32 + 32);
  CHECK(static_cast<double>(reference.sum() - 32 * 32) / (32 * 64) == doctest::Approx(1.227).epsilon(0.001));
  CHECK(reference.says("rounding=reference keeps"));
}

TEST_CASE(
    "pyramid: reference keeps all of a prompt within the capacity, is uniform below twice that, and needs a window "
    "that fits") {
  const allocate::Pyramid reference{20, PyramidRounding::reference, 8};
  CHECK(run(reference, 2, V(2, 60), Budget::rows(64)).rows == V{60, 60});
  const auto uniform = run(reference, 2, V(2, 100), Budget::rows(64));
  CHECK(uniform.rows == V{64, 64});
  CHECK(uniform.says("degenerated to uniform"));
  CHECK(run(reference, 2, V(2, 512), Budget::rows(64)).rows == V{118, 10});
  CHECK_THROWS_AS(run(reference, 2, V(2, 512), Budget::rows(8)), std::invalid_argument);
  CHECK(run(reference, 1, V(1, 512), Budget::rows(64)).rows == V{64});
}

TEST_CASE("pyramid: kvpress rounding, its fallback is an audit entry, and it needs a ratio") {
  const allocate::Pyramid kvpress{20, PyramidRounding::kvpress, 64};
  const auto shaped = run(kvpress, 32, V(32, 4096), Budget::retain(0.5));
  CHECK(shaped.rows[0] == 3994);
  CHECK(shaped.rows[1] == 3868);
  CHECK(shaped.rows[31] == 102);
  CHECK_FALSE(shaped.says("fell back"));
  const auto fallback = run(kvpress, 32, V(32, 4096), Budget::retain(0.25));
  CHECK(fallback.rows == V(32, 1024));
  CHECK(fallback.says("fell back to uniform"));
  CHECK_FALSE(run({20, PyramidRounding::kvpress, 8}, 32, V(32, 4096), Budget::retain(0.25)).says("fell back"));
  CHECK(run(kvpress, 4, V(4, 3), Budget::retain(0.1)).rows == V(4, 1));
  CHECK_THROWS_AS(run(kvpress, 32, V(32, 4096), Budget::rows(100)), std::invalid_argument);
}

TEST_CASE("pyramid: heads shorter than their layer's share keep all they have, and the audit says so") {
  const auto r = run({20}, 2, {10, 100, 100, 100}, Budget::rows(30));  // m = 30 > t = 10: flat
  CHECK(r.rows == V{10, 30, 30, 30});
  CHECK(r.says("1 heads hold fewer rows"));
  CHECK(run({20}, 2, {10, 100, 0, 100}, Budget::retain(1)).rows == V{10, 100, 0, 100});
}

TEST_CASE("U15: what is planned before changes nothing") {
  const allocate::Pyramid pyramid;
  const auto alone = run(pyramid, 8, V(8, 4000), Budget::rows(200)).rows;
  (void)run(pyramid, 8, V(8, 100), Budget::rows(90));
  CHECK(run(pyramid, 8, V(8, 4000), Budget::rows(200)).rows == alone);
}

TEST_CASE("pyramid refuses parameters that make no shape") {
  CHECK_THROWS_AS(run({0}, 2, V(2, 50), Budget::rows(10)), std::invalid_argument);
  CHECK_THROWS_AS(run({20, PyramidRounding::exact, -1}, 2, V(2, 50), Budget::rows(10)), std::invalid_argument);
}

TEST_CASE("pyramid: exact=true hands out the whole budget, in proportion, whatever the lengths of the heads") {
  const allocate::Pyramid exact{.exact = true};
  // 0.152 of 8000 rows is 1216 = 8 * 152: nothing is left over.
  CHECK(run(exact, 4, V(8, 1000), Budget::retain(0.152)).rows == run({}, 4, V(8, 1000), Budget::retain(0.152)).rows);
  const auto more = run(exact, 4, V(8, 1000), Budget::bytes(323 * 16)),
             plain = run({}, 4, V(8, 1000), Budget::bytes(323 * 16));
  CHECK(plain.rows == V{78, 78, 53, 53, 27, 27, 2, 2});
  CHECK(plain.sum() == 320);
  // 3 rows over 78 78 53 53 27 27 2 2 of 320: 0.731 0.731 0.497 0.497 0.253 0.253 0.019 0.019.
  CHECK(more.rows == V{79, 79, 54, 53, 27, 27, 2, 2});
  const auto ragged = run(exact, 2, {100, 3, 50, 70}, Budget::rows(40));
  CHECK(ragged.sum() == 160);
  CHECK(ragged.rows[1] == 3);
  CHECK_THROWS_AS(run({.rounding = PyramidRounding::reference, .exact = true}, 4, V(8, 1000), Budget::rows(64)),
                  std::invalid_argument);
}
