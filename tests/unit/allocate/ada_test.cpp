#include "kvevict/allocate/ada.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/sharing.hpp"
#include "kvevict/allocate/pyramid.hpp"

using namespace kvevict;

static_assert(LayerAllocator<allocate::Ada<>> && LayerAllocator<allocate::Ada<allocate::Pyramid>> &&
              !StaticAllocator<allocate::Ada<>>);

namespace {
using V = std::vector<index_t>;
using Scores = std::vector<std::vector<float>>;
constexpr float inf = std::numeric_limits<float>::infinity();

// One layer of scores that owns its arrays.
struct Layer {
  std::vector<float> flat;
  V tokens;
  Protect protect;
  Matrix<const float> scores;
  bool comparable;
  Layer(const Scores& rows, Protect asked = {}, bool compare = true) : protect(asked), comparable(compare) {
    std::size_t width = 0;
    for (const auto& r : rows) width = std::max(width, r.size());
    for (const auto& r : rows) {
      flat.insert(flat.end(), r.begin(), r.end());
      flat.insert(flat.end(), width - r.size(), 1e30f);  // columns past a head's tokens are never read
      tokens.push_back(static_cast<index_t>(r.size()));
    }
    const auto cols = static_cast<index_t>(width);
    scores = {flat.data(), static_cast<index_t>(rows.size()), cols, cols};
  }
  tests::Sharing sharing() const { return {3, tokens, protect, comparable}; }
};

template <class A>
V split(const A& ada, const Layer& layer, std::int64_t total, Audit* audit = nullptr, int threads = 1) {
  Audit own;
  return layer.sharing().rows(ada, layer.scores, total, audit ? *audit : own, threads);
}

// c of the head's rows are high (and all different), the others low.
std::vector<float> head_of(index_t tokens, index_t high) {
  std::vector<float> out;
  for (index_t i = 0; i < tokens; ++i) out.push_back(static_cast<float>(i < high ? 100 + i : -i));
  return out;
}

// What Ada is to do, written down row by row.
V expected_split(const Layer& layer, std::int64_t total, double floor) {
  const auto heads = std::ssize(layer.tokens);
  const double m = static_cast<double>(total) / static_cast<double>(heads);
  V kept(layer.tokens.size(), 0);
  std::vector<std::tuple<float, index_t, index_t>> rest;  // -score, head, index
  std::int64_t left = total;
  for (index_t h = 0; h < heads; ++h) {
    const auto i = static_cast<std::size_t>(h);
    const index_t tokens = layer.tokens[i];
    const auto asked = protect_asked(layer.protect, tokens);
    const auto most = static_cast<index_t>(layer.protect.share == ProtectShare::half ? std::ceil(m / 2) : m);
    const index_t aside = std::min(asked.sinks + asked.newest, most);
    const auto fixed = protect_at_most(asked, aside);
    std::vector<std::tuple<float, index_t, index_t>> rows;
    for (index_t r = fixed.sinks; r < tokens - fixed.newest; ++r) rows.emplace_back(-layer.scores.at(h, r), h, r);
    std::sort(rows.begin(), rows.end());
    const auto reserve = std::min<std::int64_t>(
        tokens, std::max<std::int64_t>(1, static_cast<std::int64_t>(std::floor(floor * m + 1e-9))));
    const auto best = static_cast<std::size_t>(std::max<std::int64_t>(0, reserve - aside));
    kept[i] = aside + static_cast<index_t>(best);
    left -= kept[i];
    rest.insert(rest.end(), rows.begin() + static_cast<std::ptrdiff_t>(best), rows.end());
  }
  std::sort(rest.begin(), rest.end());
  for (std::int64_t r = 0; r < left; ++r)
    ++kept[static_cast<std::size_t>(std::get<1>(rest[static_cast<std::size_t>(r)]))];
  return kept;
}
}  // namespace

TEST_CASE("ada: the best rows of the layer decide, above a floor for every head") {
  const Layer layer({{9, 8, 7, 6, 5, 4}, {3, 2, 1, 0, 0, 0}});
  CHECK(split(allocate::Ada<>{.floor = 0}, layer, 6) == V{5, 1});  // m = 3; one row at least
  CHECK(split(allocate::Ada<>{.floor = 1}, layer, 6) == V{3, 3});
  CHECK(split(allocate::Ada<>{.floor = 0.7}, layer, 6) == V{4, 2});  // floor(2.1)
}

TEST_CASE("ada: ties go to the lower head") {
  const Layer layer({{1, 1, 1, 1}, {1, 1, 1, 1}});
  CHECK(split(allocate::Ada<>{.floor = 0.2}, layer, 5) == V{4, 1});
}

TEST_CASE("ada: protected rows are set aside before scores are compared") {
  // The window is the last row of each head (of 4 tokens at most 2, asked 1) and has no score.
  const Layer plain({{9, 8, 7, -inf}, {1, 1, 1, -inf}}, {0, 1, ProtectShare::half});
  CHECK(split(allocate::Ada<>{.floor = 0}, plain, 4) == V{3, 1});  // the windows, then 9 and 8
  const Layer sinks({{9, 8, 7, 6}, {0, 1, 1, 1}}, {1, 0, ProtectShare::half});
  CHECK(split(allocate::Ada<>{.floor = 0}, sinks, 3) == V{2, 1});
  const Layer full({{9, 8, 7, 6, 5, 4}, {0, 0, 0, 0, 0, 0}}, {2, 0, ProtectShare::full});
  CHECK(split(allocate::Ada<>{.floor = 0}, full, 6) == V{4, 2});  // m = 3: both sinks of both heads
  const Layer half({{9, 8, 7, 6, 5, 4}, {0, 0, 0, 0, 0, 0}}, {3, 0, ProtectShare::half});
  CHECK(split(allocate::Ada<>{.floor = 0}, half, 2) == V{1, 1});  // m = 1: one set aside in each
}

TEST_CASE("ada: what the selector protects is what was set aside") {
  const Layer layer({head_of(20, 20), head_of(20, 0)}, {0, 8, ProtectShare::half});
  const allocate::Ada<> ada{.floor = 0};
  CHECK(split(ada, layer, 10) == V{7, 3});  // m = 5: 3 set aside, the 4 left go to the first head
  CHECK(protect_within(layer.sharing().protection(ada, 10, 0), 7).newest == 3);
  CHECK(protect_within(protect_asked(layer.protect, 20), 7).newest == 4);
}

TEST_CASE("U13: largest remainder by default, the reference's interpolation on request") {
  const Layer layer({head_of(16, 9), head_of(16, 3), head_of(16, 1), head_of(16, 3)});
  Audit audit;
  CHECK(split(allocate::Ada<>{.floor = 0.5, .variant = AdaVariant::reference}, layer, 16, &audit) == V{6, 4, 2, 4});
  CHECK(audit.entries().empty());
  CHECK(split(allocate::Ada<>{.floor = 0.2, .variant = AdaVariant::reference}, layer, 16, &audit) == V{7, 2, 1, 2});
  CHECK(audit.entries() ==
        std::vector<std::string>{"ada: variant=reference keeps 12 rows in layer 3, 16 were granted"});
  for (const double floor : {0.5, 0.2}) {
    const V rows = split(allocate::Ada<>{.floor = floor}, layer, 16);
    CHECK(std::accumulate(rows.begin(), rows.end(), 0) == 16);
  }
  CHECK(split(allocate::Ada<>{.floor = 0.2}, layer, 16) == V{9, 3, 1, 3});
}

TEST_CASE("U14: the defaults adapt, and the more concentrated head gets fewer rows") {
  std::vector<float> concentrated(40, 0.f), flat(40, 1.f / 40);
  concentrated[5] = concentrated[9] = 0.5f;
  const V rows = split(allocate::Ada<>{}, Layer({concentrated, flat}), 20);
  CHECK(rows[0] < rows[1]);
  CHECK(rows == V{2, 18});
}

TEST_CASE("ada: scores on scales of their own are compared after a softmax per head") {
  // The first head's scores are larger everywhere, but flat; the second head's are peaked.
  const Scores scores{{100, 100, 100, 100}, {9, 9, 0, 0}};
  CHECK(split(allocate::Ada<>{}, Layer(scores), 4) == V{3, 1});
  CHECK(split(allocate::Ada<>{}, Layer(scores, {}, false), 4) == V{2, 2});
  CHECK(split(allocate::Ada<>{.normalize = Normalize::none}, Layer(scores, {}, false), 4) == V{3, 1});
  CHECK(split(allocate::Ada<>{.normalize = Normalize::softmax}, Layer(scores), 4) == V{2, 2});
  // -inf takes no part in the softmax and stays last; an all -inf head is legal.
  CHECK(split(allocate::Ada<>{}, Layer({{0, 0, -inf, -inf}, {0, 0, 0, -inf}}, {}, false), 5) == V{2, 3});
  CHECK(split(allocate::Ada<>{}, Layer({{-inf, -inf}, {0, 1}}, {}, false), 3) == V{1, 2});
}

TEST_CASE("ada: concentration weighs a head by what its best rows hold, for the reference alone") {
  // b = 2: the first head's best two hold 0.5 of 1.0, the second's all of it.
  const Layer layer({{0.26f, 0.24f, 0.25f, 0.25f}, {0.2f, 0.2f, 0.f, 0.f}});
  const allocate::Ada<> raw{.floor = 0, .variant = AdaVariant::reference};
  allocate::Ada<> weighed = raw;
  weighed.concentration = true;
  CHECK(split(raw, layer, 4) == V{4, 1});  // a head keeps one row even where it has no hit
  CHECK(split(weighed, layer, 4) == V{2, 2});
  CHECK_THROWS_AS(split(allocate::Ada<>{.concentration = true}, layer, 4), std::invalid_argument);
}

TEST_CASE("ada: kvpress variant keeps a hard floor and ranks the window by score") {
  // t = 20, r = 0.5: N = 10, floor int(0.2 * 10) = 2; the first head's scores are above all of the second's.
  const Layer layer({head_of(20, 20), head_of(20, 0)});
  const allocate::Ada<> ada{.variant = AdaVariant::kvpress};
  const V tokens(2, 20);
  Audit audit;
  std::vector<std::int64_t> totals(1);
  ada.layer_totals({1, 2, 2, 4, 4}, tokens, Budget::retain(0.5).resolve(tokens, 1, 1, audit), totals, audit);
  CHECK(totals[0] == 20);
  CHECK(split(ada, layer, totals[0]) == V{18, 2});
  CHECK_THROWS_AS(split(ada, Layer({{1, 2}, {3, 4}}, {0, 1, ProtectShare::half}), 2), std::invalid_argument);
  CHECK(split(ada, Layer({{1, 2}, {3, 4}}, {0, 1, ProtectShare::score}), 2) == V{1, 1});
  CHECK_THROWS_AS(
      ada.layer_totals({1, 2, 2, 4, 4}, tokens, Budget::rows(10).resolve(tokens, 1, 1, audit), totals, audit),
      std::invalid_argument);
}

TEST_CASE("ada: the reference keeps its window on top and therefore needs protect=full") {
  std::vector<float> high = head_of(20, 12), low = head_of(20, 0);
  for (auto* head : {&high, &low}) std::fill(head->end() - 4, head->end(), -inf);
  const allocate::Ada<> ada{.floor = 0.5, .variant = AdaVariant::reference};
  // C = 10, b = 6: hits 12 and 0, int(0.5 * 6) = 3 -> 9 and 3, plus the window of 4.
  CHECK(split(ada, Layer({high, low}, {0, 4, ProtectShare::full}), 20) == V{13, 7});
  CHECK(split(ada, Layer({high, low}, {0, 4, ProtectShare::full}), 6) == V{3, 3});  // C < window
  // C = 0, since an empty head counts: heads that hold rows keep one all the same.
  CHECK(split(ada, Layer({head_of(3, 1), {}, head_of(9, 2)}, {0, 4, ProtectShare::full}), 2) == V{1, 0, 1});
  CHECK_THROWS_AS(split(ada, Layer({high, low}, {0, 4, ProtectShare::half}), 20), std::invalid_argument);
}

TEST_CASE("ada: layer totals sum to the grant, also where a layer is nearly empty") {
  const CacheShape shape{3, 2, 2, 4, 4};
  Audit audit;
  std::vector<std::int64_t> totals(3);
  const auto run = [&](const auto& ada, const V& tokens, const Budget& budget) {
    ada.layer_totals(shape, tokens, budget.resolve(tokens, 1, 1, audit), totals, audit);
    return totals;
  };
  using T = std::vector<std::int64_t>;
  CHECK(run(allocate::Ada<>{}, V(6, 100), Budget::retain(0.149)) == T{30, 30, 29});  // 89 rows
  CHECK(run(allocate::Ada<>{}, {1, 1, 50, 50, 50, 50}, Budget::retain(0.1)) == T{2, 9, 9});
  CHECK(run(allocate::Ada<>{allocate::Uniform{true}}, V(6, 100), Budget::retain(0.149)) == T{30, 30, 29});
  CHECK(run(allocate::Ada<>{.variant = AdaVariant::reference}, V(6, 100), Budget::retain(0.149)) == T{28, 28, 28});
  CHECK(run(allocate::Ada<allocate::Pyramid>{}, V(6, 100), Budget::rows(10)) ==
        T{38, 20, 2});  // 19.5 10 0.5 -> 20 10 0 -> 19 10 1
}

namespace {
// A base that gives everything to the last layer.
struct LastLayer {
  index_t minimum_rows = 0;
  void allocate(const CacheShape& shape, std::span<const index_t>, const GrantedBudget& budget, Matrix<index_t> out,
                Audit&) const {
    for (index_t l = 0; l < shape.layers; ++l)
      for (index_t h = 0; h < shape.kv_heads; ++h)
        out.at(l, h) = l + 1 == shape.layers ? static_cast<index_t>(budget.total) / shape.kv_heads : 0;
  }
};
}  // namespace

TEST_CASE("ada over a base with empty layers raises them to one row per head, and says so") {
  const V tokens(6, 100);
  Audit audit;
  std::vector<std::int64_t> totals(3);
  allocate::Ada<LastLayer>{}.layer_totals({3, 2, 2, 4, 4}, tokens, Budget::rows(10).resolve(tokens, 1, 1, audit),
                                          totals, audit);
  CHECK(totals == std::vector<std::int64_t>{2, 2, 56});
  CHECK(audit.entries().size() == 1);
}

TEST_CASE("ada equals its definition row by row, for any protection, ties and lengths") {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const std::size_t heads = 1 + random() % 5;
    Scores scores(heads);
    std::int64_t held = 0;
    for (auto& row : scores) {
      row.resize(1 + random() % 40);
      held += std::ssize(row);
      for (auto& s : row) s = static_cast<float>(random() % 12);  // many ties
    }
    const Protect protect{static_cast<index_t>(random() % 4), static_cast<index_t>(random() % 9),
                          random() % 2 ? ProtectShare::half : ProtectShare::full};
    const Layer layer(scores, protect);
    const auto least = static_cast<std::int64_t>(heads);
    const std::int64_t total = least + static_cast<std::int64_t>(random()) % (held - least + 1);
    const double floor = static_cast<double>(random() % 11) / 10;
    const V rows = split(allocate::Ada<>{.floor = floor}, layer, total);
    CHECK(rows == (total == held ? layer.tokens : expected_split(layer, total, floor)));
    CHECK(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) == total);
    CHECK(split(allocate::Ada<>{.floor = floor}, layer, total, nullptr, 3) == rows);
  }
}

TEST_CASE("U15: ada keeps no state, and permuting heads without ties permutes their rows") {
  std::mt19937 random(11);
  Scores scores(3, std::vector<float>(30));
  for (auto& row : scores)
    for (auto& s : row) s = static_cast<float>(random());
  const V rows = split(allocate::Ada<>{}, Layer(scores), 31);
  (void)split(allocate::Ada<>{}, Layer({{1, 2}, {3, 4}, {5, 6}}), 4);
  CHECK(split(allocate::Ada<>{}, Layer(scores), 31) == rows);
  const V turned = split(allocate::Ada<>{}, Layer({scores[2], scores[0], scores[1]}), 31);
  CHECK(turned == V{rows[2], rows[0], rows[1]});
}

TEST_CASE("ada: a NaN score is an error that names head and token") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const bool comparable : {true, false})
    for (const bool concentration : {true, false}) {
      const Layer layer({{1, 2, 3}, {4, nan, 6}}, {}, comparable);
      const allocate::Ada<> ada{.variant = concentration ? AdaVariant::reference : AdaVariant::exact,
                                .concentration = concentration};
      CHECK_THROWS_WITH_AS(split(ada, layer, 4), "NaN score in row 1, token 1; a number or an infinity is required",
                           NanScore);
    }
}

TEST_CASE("ada refuses a floor outside [0, 1] and a total below one row per head") {
  const Layer layer({{1, 2, 3}, {4, 5, 6}});
  CHECK_THROWS_AS(split(allocate::Ada<>{.floor = 1.5}, layer, 4), std::invalid_argument);
  CHECK_THROWS_AS(split(allocate::Ada<>{.floor = std::nan("")}, layer, 4), std::invalid_argument);
  CHECK_THROWS_AS(split(allocate::Ada<>{}, layer, 1), std::invalid_argument);
  CHECK(split(allocate::Ada<>{}, layer, 6) == V{3, 3});
}
