// Selectors: what stays of one head, given its scores, its budget and what is protected.
#include "kvevict/select/selector.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/cpu/block_topk.hpp"
#include "kvevict/cpu/score_threshold.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/select/block_topk.hpp"
#include "kvevict/select/score_threshold.hpp"

namespace kvevict {
namespace {

static_assert(HostSelector<TopK> && HostSelector<ScoreThreshold> && HostSelector<BlockTopK>);

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
using Indices = std::vector<index_t>;

template <HostSelector S>
Indices kept(const S& selector, const std::vector<float>& row, index_t budget, Protect protect = {}) {
  std::vector<std::byte> scratch(select_scratch_bytes(selector, static_cast<index_t>(row.size())));
  Indices out(std::min(static_cast<std::size_t>(budget), row.size()), -1);
  out.resize(static_cast<std::size_t>(
      select_row(selector, row, budget, protect_asked(protect, static_cast<index_t>(row.size())), out, scratch)));
  return out;
}

// first, first + 1, ..., last - 1
Indices range(index_t first, index_t last) {
  Indices out(static_cast<std::size_t>(last - first));
  std::iota(out.begin(), out.end(), first);
  return out;
}

Indices joined(std::initializer_list<Indices> parts) {
  Indices out;
  for (const Indices& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

}  // namespace

TEST_CASE("TopK without protection is the best rows") {
  const std::vector<float> row{1, 5, 3, 4, 2};
  CHECK(kept(TopK{}, row, 2) == Indices{1, 3});
  CHECK(kept(TopK{}, row, 0) == Indices{});
  CHECK(kept(TopK{}, row, 5) == range(0, 5));
}

TEST_CASE("a budget that covers all rows is the identity, and reads no score") {
  CHECK(kept(TopK{}, {nan, nan, nan}, 3) == range(0, 3));
  CHECK(kept(TopK{}, {nan, nan, nan}, 9) == range(0, 3));
  CHECK(kept(BlockTopK{2}, {nan, nan, nan}, 9) == range(0, 3));
}

TEST_CASE("protected rows stay whatever their score, and their scores are not read") {
  //                           sinks           window 3
  const std::vector<float> row{nan, 7, 1, 9, 2, 8, -inf, -inf, nan};
  // Budget 6, half: 3 protected: the sink and the newest two. Three by score among rows 1..6.
  CHECK(kept(TopK{}, row, 6, {.sinks = 1, .window = 3}) == Indices{0, 1, 3, 5, 7, 8});
  // Full: the sink and three, then two by score among rows 1..5.
  CHECK(kept(TopK{}, row, 6, {.sinks = 1, .window = 3, .share = ProtectShare::full}) == Indices{0, 3, 5, 6, 7, 8});
}

TEST_CASE("protect=score protects no range: the scores alone decide") {
  CHECK(kept(TopK{}, {1, 9, 8, 2}, 2, {.sinks = 1, .window = 1, .share = ProtectShare::score}) == Indices{1, 2});
}

TEST_CASE("window rows beyond the protected half stay only if nothing else is left") {
  // Window 4 of 10 rows holds -inf. Budget 9: five protected by half, four of them exist; five by score of six.
  const std::vector<float> row{6, 5, 4, 3, 2, 1, -inf, -inf, -inf, -inf};
  CHECK(kept(TopK{}, row, 9, {.window = 4}) == Indices{0, 1, 2, 3, 4, 6, 7, 8, 9});
  // Budget 4: two protected, two by score, and no other window row.
  CHECK(kept(TopK{}, row, 4, {.window = 4}) == Indices{0, 1, 8, 9});
}

TEST_CASE("U43: sinks 4, budget 4: two sinks protected, two by score") {
  const std::vector<float> row{0, 0, 0, 0, 1, 2, 9, 3, 8, 4};
  CHECK(kept(TopK{}, row, 4, {.sinks = 4}) == Indices{0, 1, 6, 8});
}

TEST_CASE("U44: equal scores keep the lowest rows, whatever is protected") {
  const std::vector<float> row(20, 1.f);
  CHECK(kept(TopK{}, row, 5) == range(0, 5));
  CHECK(kept(TopK{}, row, 6, {.sinks = 1, .window = 2}) == Indices{0, 1, 2, 3, 18, 19});
}

TEST_CASE("U47: new rows with score 0 inside a window of half the budget are kept") {
  std::vector<float> row(64);
  for (std::size_t i = 0; i < 48; ++i) row[i] = 100 + static_cast<float>(i);  // 16 newest rows: score 0
  const Indices rows = kept(TopK{}, row, 32, {.window = 16});
  CHECK(rows == joined({range(32, 48), range(48, 64)}));
}

TEST_CASE("U48: sinks and window up to half of the budget") {
  std::vector<float> row(200);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i % 100);
  const Protect protect{.sinks = 4, .window = 32};
  // Budget 72: all 36 protected rows, 36 by score: 99..68 of rows 68..99, and of the second hundred 67..64 (rows
  // 164..167; rows from 168 on are the window), tie with rows 64..67, which are lower.
  CHECK(protect_within(protect_asked(protect, 200), 72).count() == 36);
  CHECK(kept(TopK{}, row, 72, protect) == joined({range(0, 4), range(66, 100), range(166, 168), range(168, 200)}));
  // Budget 36: 4 sinks and the newest 14; 18 by score among rows 4..185: 99..86 once, 85 and 84 twice.
  CHECK(protect_within(protect_asked(protect, 200), 36).count() == 18);
  CHECK(kept(TopK{}, row, 36, protect) == joined({range(0, 4), range(84, 100), range(184, 200)}));
}

TEST_CASE("a NaN among the ranked scores names its token in the row") {
  std::vector<float> row(50, 1.f);
  row[30] = nan;
  bool thrown = false;
  try {
    (void)kept(TopK{}, row, 10, {.sinks = 2, .window = 4});
  } catch (const NanScore& error) {
    thrown = true;
    CHECK(error.token == 30);
  }
  CHECK(thrown);
  CHECK_THROWS_AS((void)kept(ScoreThreshold{0.5f}, row, 10), NanScore);
  CHECK_THROWS_AS((void)kept(BlockTopK{4}, row, 10), NanScore);
}

TEST_CASE("a negative budget and a short output are refused") {
  std::vector<std::byte> scratch(select_scratch_bytes(TopK{}, 4));
  Indices out(1);
  const std::vector<float> row{1, 2, 3, 4};
  CHECK_THROWS_WITH_AS((void)select_row(TopK{}, row, -1, {}, out, scratch),
                       "TopK: a budget of -1 rows; 0 or more are required", std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)select_row(TopK{}, row, 2, {}, out, scratch), "TopK: out holds 1 rows; 2 are kept",
                       std::invalid_argument);
}

TEST_CASE("U40: keep or skip by a threshold: .1, .6, .4 at .5 keeps row 1 alone") {
  CHECK(kept(ScoreThreshold{0.5f}, {.1f, .6f, .4f}, 3) == Indices{1});
  CHECK(kept(ScoreThreshold{0.4f}, {.1f, .6f, .4f}, 3) == Indices{1, 2});  // equal passes
  CHECK(kept(ScoreThreshold{0.9f}, {.1f, .6f, .4f}, 3) == Indices{});
  CHECK(kept(ScoreThreshold{0.05f}, {.1f, .6f, .4f}, 2) == Indices{1, 2});  // the budget is a limit
  CHECK(kept(ScoreThreshold{0.5f}, {.1f, .6f, .4f, .2f}, 3, {.window = 1}) == Indices{1, 3});
  CHECK(specification(ScoreThreshold{0.5f}) == "threshold(threshold=0.5)");
  CHECK_THROWS_AS((void)kept(ScoreThreshold{nan}, {.1f}, 1), std::domain_error);
}

TEST_CASE("U56: whole blocks by their mean score") {
  //                           mean 2      mean 5      mean 3      mean 4
  const std::vector<float> row{2, 2, 2, 2, 20, 0, 0, 0, 3, 3, 3, 3, 4, 4, 4, 4};
  CHECK(kept(BlockTopK{4}, row, 4) == range(4, 8));
  CHECK(kept(BlockTopK{4}, row, 8) == joined({range(4, 8), range(12, 16)}));
  CHECK(kept(BlockTopK{4}, row, 12) == range(4, 16));
  CHECK(kept(TopK{}, row, 4) == Indices{4, 12, 13, 14});  // row by row it is another choice
}

TEST_CASE("the last block gives its best rows, so that the budget is met") {
  const std::vector<float> row{9, 9, 9, 9, 1, 7, 2, 6, 0, 0, 0, 0};
  CHECK(kept(BlockTopK{4}, row, 6) == Indices{0, 1, 2, 3, 5, 7});
  CHECK(kept(BlockTopK{4}, row, 3) == Indices{0, 1, 2});  // ties: the lower row
}

TEST_CASE("blocks next to protected rows are shorter") {
  // Rows 0 and 9..10 are protected; blocks of 4 from row 0: {1,2,3}, {4..7}, {8}.
  const std::vector<float> row{0, 1, 1, 1, 5, 5, 5, 5, 9, 0, 0};
  const Protect protect{.sinks = 1, .window = 2, .share = ProtectShare::full};
  CHECK(kept(BlockTopK{4}, row, 4, protect) == Indices{0, 8, 9, 10});
  CHECK(kept(BlockTopK{4}, row, 6, protect) == Indices{0, 4, 5, 8, 9, 10});
  CHECK(kept(BlockTopK{4}, row, 9, protect) == Indices{0, 1, 4, 5, 6, 7, 8, 9, 10});
  CHECK(kept(BlockTopK{1}, row, 6, protect) == kept(TopK{}, row, 6, protect));
  CHECK(kept(BlockTopK{100}, row, 5, protect) == kept(TopK{}, row, 5, protect));
  CHECK(specification(BlockTopK{4}) == "block(block=4)");
  CHECK_THROWS_AS((void)kept(BlockTopK{0}, row, 5), std::invalid_argument);
}

}  // namespace kvevict
