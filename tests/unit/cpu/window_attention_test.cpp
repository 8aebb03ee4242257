#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/score/snapkv.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/observe/observation.hpp"

namespace {
using namespace kvevict;
using Row = std::vector<float>;
constexpr float none = -std::numeric_limits<float>::infinity();

// One layer with memory of its own. Heads may differ in length; window queries are those of the last positions.
template <class T>
struct Layer {
  CacheShape shape;
  std::vector<std::vector<T>> k, q;             // [kv_heads][tokens * dim], [q_heads][recorded * dim]
  std::vector<std::vector<index_t>> positions;  // [kv_heads][tokens]
  std::vector<index_t> window_positions;
  std::vector<float> lse;
  float scale = 1.f;
  OwnedObservation<T> observed;

  Layer(CacheShape s, const std::vector<index_t>& tokens, index_t recorded) : shape(s) {
    const index_t most = *std::max_element(tokens.begin(), tokens.end());
    for (const index_t t : tokens) {
      k.emplace_back(static_cast<std::size_t>(t) * static_cast<std::size_t>(s.head_dim_k));
      positions.emplace_back(static_cast<std::size_t>(t));
      std::iota(positions.back().begin(), positions.back().end(), most - t);
    }
    q.assign(static_cast<std::size_t>(s.q_heads),
             std::vector<T>(static_cast<std::size_t>(recorded) * static_cast<std::size_t>(s.head_dim_k)));
    window_positions.resize(static_cast<std::size_t>(recorded));
    std::iota(window_positions.begin(), window_positions.end(), most - recorded);
  }
  const LayerObservation<T> observation() {
    const index_t d = shape.head_dim_k;
    observed = {};
    observed.shape = shape;
    observed.layer = 5;
    observed.softmax_scale = scale;
    observed.window_positions = window_positions;
    observed.lse = lse;
    for (std::size_t h = 0; h < k.size(); ++h) {
      observed.keys.push_back(dense_rows<const T>(k[h].data(), static_cast<std::int64_t>(positions[h].size()), d));
      observed.positions.emplace_back(positions[h]);
    }
    for (const auto& rows : q)
      observed.window_queries.push_back(
          dense_rows<const T>(rows.data(), static_cast<std::int64_t>(window_positions.size()), d));
    return observed.observation();
  }
};

// Numbers in [-1, 1), the same everywhere.
struct Noise {
  std::uint64_t state;
  float operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f;
  }
};

template <class T = float>
Layer<T> random_layer(CacheShape shape, const std::vector<index_t>& tokens, index_t recorded, float amplitude = 2.f) {
  Layer<T> layer(shape, tokens, recorded);
  Noise noise{static_cast<std::uint64_t>(shape.head_dim_k) * 1000003u + static_cast<std::uint64_t>(tokens[0])};
  for (auto* all : {&layer.k, &layer.q})
    for (auto& rows : *all)
      for (auto& x : rows) x = from_float<T>(noise() * amplitude);
  layer.scale = 1.f / std::sqrt(static_cast<float>(shape.head_dim_k));
  return layer;
}

template <class T>
std::vector<Row> scores_of(const score::SnapKV& scorer, Layer<T>& layer, host_exec exec = {}) {
  const auto o = layer.observation();
  const index_t cols = o.most_tokens();
  std::vector<float> flat(static_cast<std::size_t>(scorer.score_heads(layer.shape)) * static_cast<std::size_t>(cols),
                          -7.f);
  score_on(exec, scorer, o, {flat.data(), scorer.score_heads(layer.shape), cols, cols});
  std::vector<Row> out;
  for (auto at = flat.begin(); at != flat.end(); at += cols) out.emplace_back(at, at + cols);
  return out;
}

// The definition in float64, written down directly. Also gives the log-sum-exp of the recorded rows.
struct Oracle {
  std::vector<std::vector<double>> scores;  // [score heads][most tokens]; unscored columns are NaN
  std::vector<float> lse;
};
template <class T>
Oracle oracle(const score::SnapKV& s, Layer<T>& layer) {
  const auto o = layer.observation();
  const CacheShape& shape = layer.shape;
  const index_t recorded = static_cast<index_t>(layer.window_positions.size()), most = o.most_tokens();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Oracle out;
  std::vector<std::vector<double>> by_query(static_cast<std::size_t>(shape.q_heads));
  for (index_t g = 0; g < shape.q_heads; ++g) {
    const index_t h = g / shape.group(), t = o.tokens(h), used = std::min(s.window, std::max(1, t / 2));
    auto& sums = by_query[static_cast<std::size_t>(g)];
    sums.assign(static_cast<std::size_t>(std::max(0, t - used)), 0.0);
    for (index_t i = 0; i < recorded; ++i) {
      std::vector<double> p;
      double total = 0;
      for (index_t j = 0; j < t; ++j) {
        double dot = 0;
        for (index_t c = 0; c < shape.head_dim_k; ++c)
          dot += static_cast<double>(to_float(o.keys[static_cast<std::size_t>(h)].at(j, c))) *
                 static_cast<double>(to_float(o.window_queries[static_cast<std::size_t>(g)].at(i, c)));
        const bool seen = o.positions[static_cast<std::size_t>(h)][static_cast<std::size_t>(j)] <=
                          layer.window_positions[static_cast<std::size_t>(i)];
        p.push_back(seen ? std::exp(dot * static_cast<double>(layer.scale)) : 0.0);
        total += p.back();
      }
      out.lse.push_back(static_cast<float>(std::log(total)));
      if (i < recorded - used || total == 0) continue;
      for (std::size_t j = 0; j < sums.size(); ++j)
        sums[j] += p[j] / total / (s.rows == RowReduction::mean ? static_cast<double>(used) : 1.0);
    }
  }
  const auto pool = [&](std::vector<double> row) {
    if (s.pool.kind == Pooling::Kind::none) return row;
    std::vector<double> to(row.size());
    const auto n = static_cast<index_t>(row.size());
    for (index_t j = 0; j < n; ++j) {
      double sum = 0, largest = -1;
      for (index_t i = std::max(0, j - s.pool.kernel / 2); i <= std::min(n - 1, j + s.pool.kernel / 2); ++i) {
        sum += row[static_cast<std::size_t>(i)];
        largest = std::max(largest, row[static_cast<std::size_t>(i)]);
      }
      to[static_cast<std::size_t>(j)] = s.pool.kind == Pooling::Kind::max ? largest : sum / s.pool.kernel;
    }
    return to;
  };
  const auto reduce = [&](const std::vector<std::vector<double>>& rows) {
    std::vector<double> to = rows[0];
    for (std::size_t g = 1; g < rows.size(); ++g)
      for (std::size_t j = 0; j < to.size(); ++j)
        to[j] = s.group == GroupReduction::max ? std::max(to[j], rows[g][j]) : to[j] + rows[g][j];
    if (s.group == GroupReduction::mean)
      for (auto& x : to) x /= static_cast<double>(rows.size());
    return to;
  };
  for (index_t h = 0; h < shape.kv_heads; ++h) {
    std::vector<std::vector<double>> rows(by_query.begin() + h * shape.group(),
                                          by_query.begin() + (h + 1) * shape.group());
    if (s.group != GroupReduction::none && s.order == PoolOrder::group_then_pool) rows = {reduce(rows)};
    for (auto& r : rows) r = pool(r);
    if (s.group != GroupReduction::none && s.order == PoolOrder::pool_then_group) rows = {reduce(rows)};
    for (auto& r : rows) {
      r.resize(static_cast<std::size_t>(most), nan);
      out.scores.push_back(r);
    }
  }
  return out;
}

// Largest difference of scored columns in units of the row's largest score; infinity where an unscored one is not -inf.
double difference(const std::vector<Row>& got, const Oracle& want, const std::vector<index_t>& tokens,
                  index_t rows_each) {
  double worst = got.size() == want.scores.size() ? 0.0 : 1e30;
  for (std::size_t r = 0; r < std::min(got.size(), want.scores.size()); ++r) {
    const index_t t = tokens[r / static_cast<std::size_t>(rows_each)];
    double largest = 0;
    for (const double x : want.scores[r])
      if (!std::isnan(x)) largest = std::max(largest, x);
    for (std::size_t j = 0; j < got[r].size(); ++j) {
      const double g = got[r][j], w = want.scores[r][j];
      if (!std::isnan(w)) worst = std::max(worst, std::abs(g - w) / largest);
      else if (g != (j < static_cast<std::size_t>(t) ? static_cast<double>(none) : -7.0)) worst = 1e30;
    }
  }
  return worst;
}
template <class T>
double difference(const score::SnapKV& s, Layer<T>& layer) {
  std::vector<index_t> tokens;
  for (const auto& p : layer.positions) tokens.push_back(static_cast<index_t>(p.size()));
  return difference(scores_of(s, layer), oracle(s, layer), tokens,
                    s.group == GroupReduction::none ? layer.shape.group() : 1);
}

score::SnapKV plain(index_t window, GroupReduction group = GroupReduction::mean) {
  score::SnapKV s;
  s.window = window;
  s.pool = Pooling::none();
  s.group = group;
  return s;
}

// Two query heads share one KV head of three tokens; element sizes are one. Logits of head 0: ln 1, ln 2, ln 3; head 1
// looks at nothing in particular.
Layer<float> three_tokens() {
  Layer<float> layer({1, 1, 2, 1, 1}, {3}, 1);
  layer.k[0] = {0.f, std::log(2.f), std::log(3.f)};
  layer.q = {{1.f}, {0.f}};
  return layer;
}

TEST_CASE("three tokens by hand: attention 1/6 2/6 3/6 and 1/3 1/3 1/3, the last token is the window") {
  Layer<float> layer = three_tokens();
  const auto check = [&](GroupReduction g, const std::vector<Row>& want) {
    const auto got = scores_of(plain(1, g), layer);
    REQUIRE(got.size() == want.size());
    for (std::size_t r = 0; r < want.size(); ++r) {
      CHECK(got[r][0] == doctest::Approx(want[r][0]).epsilon(1e-6));
      CHECK(got[r][1] == doctest::Approx(want[r][1]).epsilon(1e-6));
      CHECK(got[r][2] == none);
    }
  };
  check(GroupReduction::mean, {{1.f / 4, 1.f / 3}});
  check(GroupReduction::sum, {{1.f / 2, 2.f / 3}});
  check(GroupReduction::max, {{1.f / 3, 1.f / 3}});
  check(GroupReduction::none, {{1.f / 6, 1.f / 3}, {1.f / 3, 1.f / 3}});
}

TEST_CASE("rows are added or averaged, and each row sees the keys up to its own position") {
  Layer<float> layer({1, 1, 1, 1, 1}, {4}, 2);  // zero queries: every visible key gets the same attention
  score::SnapKV s = plain(2);
  CHECK(scores_of(s, layer)[0][0] == doctest::Approx((1.0 / 3 + 1.0 / 4) / 2));
  s.rows = RowReduction::sum;
  CHECK(scores_of(s, layer)[0][1] == doctest::Approx(1.0 / 3 + 1.0 / 4));
}

TEST_CASE("U30: masking goes by position where rows have been evicted before") {
  Layer<float> layer({1, 1, 1, 1, 1}, {4}, 2);
  layer.positions = {{0, 5, 7, 9}};
  layer.window_positions = {6, 9};  // the first query sees two keys, the second all four
  const auto got = scores_of(plain(2), layer);
  CHECK(got[0][0] == doctest::Approx((1.0 / 2 + 1.0 / 4) / 2));
  CHECK(got[0][1] == doctest::Approx((1.0 / 2 + 1.0 / 4) / 2));
  layer.window_positions = {3, 5};  // queries older than the newest rows: scored columns are masked too
  CHECK(scores_of(plain(2), layer)[0][0] == doctest::Approx((1.0 + 1.0 / 2) / 2));
  CHECK(scores_of(plain(2), layer)[0][1] == doctest::Approx((0.0 + 1.0 / 2) / 2));
}

TEST_CASE("U46: a query that sees no key adds nothing, and an empty head has no scores") {
  Layer<float> layer({1, 2, 2, 1, 1}, {4, 0}, 2);
  layer.positions[0] = {4, 5, 6, 7};
  layer.window_positions = {1, 3};
  CHECK(scores_of(plain(2), layer)[0] == Row{0, 0, none, none});
  CHECK(scores_of(plain(2), layer)[1] == Row{-7, -7, -7, -7});
  layer.lse = {none, none, none, none};
  CHECK(scores_of(plain(2), layer)[0] == Row{0, 0, none, none});
}

TEST_CASE("protect=score: window and sinks get the layer's largest score + 1, over all heads") {
  Layer<float> layer({1, 2, 2, 1, 1}, {4, 3}, 1);
  layer.q = {{1.f}, {0.f}};
  layer.k[0] = {std::log(5.f), 0.f, 0.f, 0.f};  // 5/8 1/8 1/8 (1/8)
  score::SnapKV s = plain(1);
  s.protect = ProtectShare::score;
  auto got = scores_of(s, layer);
  CHECK(got[0][0] == doctest::Approx(5.0 / 8));
  CHECK(got[0][3] == doctest::Approx(13.0 / 8));
  CHECK(got[1][1] == doctest::Approx(1.0 / 3));
  CHECK(got[1][2] == got[0][3]);
  CHECK(got[1][3] == -7.f);  // past the head's tokens: left alone
  s.sinks = 1;
  got = scores_of(s, layer);
  CHECK(got[0][0] == got[0][3]);
  CHECK(got[1][0] == got[0][3]);
  CHECK(got[1][1] == doctest::Approx(1.0 / 3));
  s.protect = ProtectShare::half;  // sinks are a range then and keep their score
  CHECK(scores_of(s, layer)[0][0] == doctest::Approx(5.0 / 8));
  CHECK(s.protection().sinks == 1);
  CHECK(s.protection().window == 1);
}

TEST_CASE("lengths around the lanes of a register, windows longer than the prompt, and a single token") {
  for (const index_t tokens : {1, 2, 3, 5, 6, 7, 11, 12, 13, 15, 16, 17, 31, 33, 95, 96, 97, 200}) {
    Layer<float> layer = random_layer<float>({1, 1, 2, 8, 8}, {tokens}, tokens);
    for (const index_t window : {1, 4, 32, 1000}) {
      CAPTURE(tokens);
      CAPTURE(window);
      CHECK(difference(plain(window), layer) < 1e-5);
      CHECK(difference(plain(window, GroupReduction::none), layer) < 1e-5);
    }
  }
  Layer<float> one = random_layer<float>({1, 1, 2, 8, 8}, {1}, 1);
  CHECK(scores_of(score::SnapKV{}, one)[0] == Row{none});
}

TEST_CASE("U7: any head dimension and any group size") {
  for (const index_t dim : {1, 2, 3, 7, 64, 65, 80, 96, 127, 128, 129, 192, 256, 300}) {
    Layer<float> layer = random_layer<float>({1, 1, 2, dim, dim}, {61}, 8);
    CAPTURE(dim);
    CHECK(difference(plain(8), layer) < 1e-5);
  }
  for (const index_t group : {1, 3, 4, 7, 24})
    for (const auto reduction : {GroupReduction::mean, GroupReduction::max, GroupReduction::none}) {
      Layer<float> layer = random_layer<float>({1, 2, 2 * group, 16, 16}, {70, 53}, 16);
      CAPTURE(group);
      for (const index_t window : {5, 16}) {
        score::SnapKV s = plain(window, reduction);
        s.pool = Pooling::max(7);
        CHECK(difference(s, layer) < 1e-5);
      }
    }
}

TEST_CASE("every option means what the definition says, and changes the result") {
  Layer<float> layer = random_layer<float>({1, 2, 6, 24, 24}, {150, 90}, 20, 3.f);
  score::SnapKV base;
  base.window = 16;
  std::vector<score::SnapKV> variants(1, base);
  const auto with = [&](auto set) {
    score::SnapKV s = base;
    set(s);
    variants.push_back(s);
  };
  with([](auto& s) { s.window = 20; });
  with([](auto& s) { s.rows = RowReduction::sum; });
  for (const Pooling p : {Pooling::none(), Pooling::max(5), Pooling::avg(5), Pooling::avg(7)})
    with([&](auto& s) { s.pool = p; });
  for (const auto g : {GroupReduction::none, GroupReduction::max, GroupReduction::sum})
    with([&](auto& s) { s.group = g; });
  with([](auto& s) { s.order = PoolOrder::pool_then_group; });
  std::vector<std::vector<Row>> all;
  for (const auto& s : variants) {
    CAPTURE(specification(s));
    CHECK(difference(s, layer) < 1e-5);
    all.push_back(scores_of(s, layer));
    for (std::size_t other = 0; other + 1 < all.size(); ++other) CHECK(all[other] != all.back());
  }
  // Orders that commute.
  for (const auto& [pool, group] :
       {std::pair{Pooling::avg(5), GroupReduction::mean}, std::pair{Pooling::max(5), GroupReduction::max}}) {
    score::SnapKV s = base;
    s.pool = pool;
    s.group = group;
    s.order = PoolOrder::pool_then_group;
    CHECK(difference(s, layer) < 1e-5);
    score::SnapKV swapped = s;
    swapped.order = PoolOrder::group_then_pool;
    CHECK(difference(scores_of(s, layer), oracle(swapped, layer), {150, 90}, 1) < 1e-5);
  }
}

TEST_CASE("U34: with the log-sum-exp of the window rows the same scores come without the attention matrix") {
  for (const auto group : {GroupReduction::mean, GroupReduction::max, GroupReduction::none}) {
    Layer<float> layer = random_layer<float>({1, 2, 6, 40, 40}, {130, 75}, 24);
    score::SnapKV s;
    s.window = 16;
    s.group = group;
    const Oracle want = oracle(s, layer);
    layer.lse = want.lse;
    CHECK(difference(scores_of(s, layer), want, {130, 75}, group == GroupReduction::none ? 3 : 1) < 1e-5);
  }
}

TEST_CASE("a log-sum-exp of other queries is refused") {
  Layer<float> layer = random_layer<float>({1, 1, 2, 8, 8}, {64}, 8);
  layer.lse.assign(16, 0.f);
  CHECK_THROWS_WITH_AS(scores_of(plain(8), layer), doctest::Contains("does not belong to these queries"),
                       std::invalid_argument);
  layer.lse.assign(16, -1000.f);
  CHECK_THROWS_AS(scores_of(plain(8), layer), std::invalid_argument);
  layer.lse.assign(15, 0.f);
  CHECK_THROWS_WITH_AS(scores_of(plain(8), layer), doctest::Contains("15 log-sum-exp values"), std::invalid_argument);
}

TEST_CASE("two passes under a scratch limit give the scores of one pass") {
  Layer<float> layer = random_layer<float>({1, 2, 6, 24, 24}, {333, 200}, 16, 3.f);
  for (const auto group : {GroupReduction::mean, GroupReduction::max}) {
    score::SnapKV s = plain(16, group);
    const auto one = scores_of(s, layer);
    s.scratch_limit = 1;
    const auto two = scores_of(s, layer);
    for (std::size_t h = 0; h < one.size(); ++h)
      for (std::size_t j = 0; j < one[h].size(); ++j)
        if (one[h][j] >= 0) CHECK(std::abs(two[h][j] - one[h][j]) <= 1e-6f * one[h][j]);
  }
}

TEST_CASE("U35: working memory can be sized beforehand, and a limit bounds it for a million keys") {
  Layer<float> layer = random_layer<float>({1, 3, 6, 16, 16}, {300, 100, 200}, 16);
  for (const std::int64_t limit : {0, 1})
    for (const int threads : {1, 2, 7}) {
      score::SnapKV s;
      s.window = 16;
      s.group = GroupReduction::max;
      s.scratch_limit = limit;
      Arena arena(window_scratch_bytes(s, layer.shape, 300, threads));
      const std::size_t before = arena.bytes();
      const auto got = scores_of(s, layer, {threads, &arena});
      CHECK(arena.bytes() == before);
      CHECK(got == scores_of(s, layer));
    }
  const CacheShape shape{1, 8, 32, 128, 128};
  const index_t million = 1000000;
  score::SnapKV s;
  // One head's window x group x tokens floats, and what does not grow with the tokens.
  CHECK(window_scratch_bytes(s, shape, million) <= std::size_t{32} * 4 * million * 4 + 1024 * 1024);
  CHECK(window_scratch_bytes(s, shape, million, 1, true) <= 1024 * 1024);
  s.scratch_limit = std::int64_t{1} << 20;
  CHECK(window_scratch_bytes(s, shape, million) <= std::size_t{1} << 20);
}

TEST_CASE("scores are bit-identical for any number of threads") {
  Layer<float> layer = random_layer<float>({1, 5, 10, 33, 33}, {400, 17, 1, 256, 399}, 16);
  for (const bool given : {false, true}) {
    score::SnapKV s;
    s.window = 16;
    if (given) layer.lse = oracle(s, layer).lse;
    const auto one = scores_of(s, layer, {1});
    CHECK(scores_of(s, layer, {2}) == one);
    CHECK(scores_of(s, layer, {7}) == one);
  }
}

TEST_CASE("keys of 16 bits score as the same numbers in float32 do, bit for bit") {
  const auto check = [](auto element) {
    using T = decltype(element);
    for (const index_t dim : {1, 7, 16, 80, 131}) {
      Layer<T> half = random_layer<T>({1, 2, 4, dim, dim}, {77, 130}, 16);
      Layer<float> full({1, 2, 4, dim, dim}, {77, 130}, 16);
      full.scale = half.scale;
      for (std::size_t h = 0; h < 2; ++h)
        std::transform(half.k[h].begin(), half.k[h].end(), full.k[h].begin(), [](T x) { return to_float(x); });
      for (std::size_t h = 0; h < 4; ++h)
        std::transform(half.q[h].begin(), half.q[h].end(), full.q[h].begin(), [](T x) { return to_float(x); });
      score::SnapKV s;
      s.window = 16;
      CHECK(scores_of(s, half) == scores_of(s, full));
    }
  };
  check(fp16_t{});
  check(bf16_t{});
}

TEST_CASE("strided, transposed and blocked rows score as dense ones do") {
  constexpr index_t dim = 20, tokens = 101;
  Layer<float> layer = random_layer<float>({1, 1, 1, dim, dim}, {tokens}, 16);
  score::SnapKV s;
  s.window = 16;
  const auto want = scores_of(s, layer);
  const auto score_with = [&](Rows<const float> keys) {
    layer.observation();
    layer.observed.keys[0] = keys;
    Row out(tokens);
    score_on(host_exec{}, s, layer.observed.observation(), {out.data(), 1, tokens, tokens});
    return out;
  };
  constexpr float far = std::numeric_limits<float>::quiet_NaN();  // must never be read
  Row strided(tokens * (dim + 5), far), transposed(static_cast<std::size_t>(dim) * 128, far),
      blocked(26 * 4 * dim, far);
  std::vector<index_t> table(26);
  for (index_t b = 0; b < 26; ++b) table[static_cast<std::size_t>(b)] = 25 - b;
  for (index_t j = 0; j < tokens; ++j)
    for (index_t c = 0; c < dim; ++c) {
      const float x = layer.k[0][static_cast<std::size_t>(j * dim + c)];
      strided[static_cast<std::size_t>(j * (dim + 5) + c)] = x;
      transposed[static_cast<std::size_t>(c * 128 + j)] = x;
      blocked[static_cast<std::size_t>((25 - j / 4) * 4 * dim + j % 4 * dim + c)] = x;
    }
  CHECK(score_with({strided.data(), tokens, dim, dim + 5}) == want[0]);
  CHECK(score_with({transposed.data(), tokens, dim, 1, 128}) == want[0]);
  CHECK(score_with({blocked.data(), tokens, dim, dim, 1, table.data(), 4, 4 * dim}) == want[0]);
}

TEST_CASE("U46: the largest float16 numbers stay finite, and a far larger key late in the prompt does too") {
  Layer<fp16_t> layer({1, 1, 1, 4, 4}, {40}, 4);
  for (auto& x : layer.k[0]) x = from_float<fp16_t>(-65504.f);
  for (auto& x : layer.q[0]) x = from_float<fp16_t>(65504.f);
  for (std::size_t c = 0; c < 4; ++c) layer.k[0][20 * 4 + c] = from_float<fp16_t>(65504.f);
  layer.scale = 0.5f;
  const auto got = scores_of(plain(4), layer);
  for (index_t j = 0; j < 36; ++j) CHECK(got[0][static_cast<std::size_t>(j)] == (j == 20 ? 1.f : 0.f));
  // Logits that climb far above those seen first: 0 ... 8000 in steps of 0.8.
  Layer<float> climbing({1, 1, 2, 1, 1}, {10001}, 1);
  for (std::size_t j = 0; j < 10001; ++j) climbing.k[0][j] = static_cast<float>(j) * 0.8f;
  climbing.q = {{1.f}, {-1.f}};
  const auto rising = scores_of(plain(1, GroupReduction::none), climbing);
  const double step = std::exp(-0.8);
  CHECK(rising[0][9999] == doctest::Approx((1 - step) * step).epsilon(1e-3));
  CHECK(rising[0][9998] == doctest::Approx((1 - step) * step * step).epsilon(1e-3));
  CHECK(rising[0][0] == 0.f);
  CHECK(rising[1][0] == doctest::Approx(1 - step).epsilon(1e-3));
  CHECK(rising[1][9999] == 0.f);
}

TEST_CASE("a NaN among the keys or queries is an error that names layer, head and token") {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
    Layer<float> layer = random_layer<float>({1, 2, 2, 16, 16}, {60, 60}, 8);
    layer.k[1][17 * 16 + 3] = value;
    CHECK_THROWS_WITH_AS(scores_of(plain(8), layer), doctest::Contains("layer 5, head 1, token"), std::domain_error);
    layer = random_layer<float>({1, 2, 2, 16, 16}, {60, 60}, 8);
    layer.q[0][5] = value;
    CHECK_THROWS_WITH_AS(scores_of(plain(8), layer), doctest::Contains("layer 5, head 0, token 0"), std::domain_error);
  }
  Layer<float> layer = random_layer<float>({1, 1, 1, 16, 16}, {60}, 8);
  layer.lse = oracle(plain(8), layer).lse;
  layer.k[0][17 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_WITH_AS(scores_of(plain(8), layer), doctest::Contains("layer 5, head 0, token 17"), std::domain_error);
}

TEST_CASE("fewer recorded queries than the window asks for is an error that names both numbers") {
  Layer<float> layer = random_layer<float>({1, 1, 2, 8, 8}, {64}, 4);
  CHECK_THROWS_WITH_AS(scores_of(plain(16), layer),
                       doctest::Contains("window of 16 queries asked, but layer 5 has 4 recorded"),
                       std::invalid_argument);
  CHECK_NOTHROW(scores_of(plain(4), layer));
}

TEST_CASE("of more recorded queries than the window the newest are used") {
  Layer<float> layer = random_layer<float>({1, 1, 2, 8, 8}, {64}, 20);
  const auto want = scores_of(plain(8), layer);
  for (auto& rows : layer.q) std::fill_n(rows.begin(), 12 * 8, 50.f);  // the older ones do not matter
  CHECK(scores_of(plain(8), layer) == want);
}

TEST_CASE("illegal parameters and outputs are refused") {
  Layer<float> layer = random_layer<float>({1, 1, 2, 8, 8}, {16}, 8);
  const auto refused = [&](score::SnapKV s, const char* message) {
    CHECK_THROWS_WITH_AS(scores_of(s, layer), doctest::Contains(message), std::invalid_argument);
  };
  score::SnapKV s;
  s.pool = Pooling::max(4);
  refused(s, "pool=max:4: the kernel must be odd");
  s = plain(0);
  refused(s, "window=0");
  s = plain(4);
  s.sinks = -1;
  refused(s, "sinks=-1");
  s = plain(4);
  s.scratch_limit = -5;
  refused(s, "scratch_limit=-5");
  Row out(16);
  CHECK_THROWS_WITH_AS(
      score_on(host_exec{}, plain(4, GroupReduction::none), layer.observation(), {out.data(), 1, 16, 16}),
      doctest::Contains("scores [1][16] asked of layer 5; [2][16] is required"), std::invalid_argument);
  CHECK_THROWS_AS(score_on(host_exec{}, plain(4), layer.observation(), {out.data(), 1, 15, 15}), std::invalid_argument);
}

TEST_CASE("U1, U3: one row of scores per KV head; per query head only where group=none says so") {
  Layer<float> layer = random_layer<float>({1, 2, 4, 8, 8}, {64, 64}, 32);
  CHECK(scores_of(score::SnapKV{}, layer).size() == 2);
  score::SnapKV s;
  s.group = GroupReduction::none;
  CHECK(scores_of(s, layer).size() == 4);
}

TEST_CASE("U17: 16 tokens with a window of 32 are scored with 8 rows") {
  Layer<float> layer = random_layer<float>({1, 1, 1, 8, 8}, {16}, 16);
  const auto got = scores_of(plain(32), layer);
  CHECK(got == scores_of(plain(8), layer));
  for (std::size_t j = 0; j < 16; ++j) CHECK((got[0][j] == none) == (j >= 8));
}

TEST_CASE("U33: heads of different lengths score as each would alone") {
  Layer<float> both = random_layer<float>({1, 2, 2, 8, 8}, {50, 20}, 25);
  const auto got = scores_of(score::SnapKV{}, both);
  for (std::size_t h = 0; h < 2; ++h) {
    const auto tokens = static_cast<index_t>(both.positions[h].size());
    Layer<float> alone({1, 1, 1, 8, 8}, {tokens}, 25);
    alone.k = {both.k[h]};
    alone.q = {both.q[h]};
    alone.positions = {both.positions[h]};
    alone.window_positions = both.window_positions;
    alone.scale = both.scale;
    const auto want = scores_of(score::SnapKV{}, alone);
    CHECK(std::equal(want[0].begin(), want[0].end(), got[h].begin()));
  }
}

TEST_CASE("duplicating the query heads of a group changes nothing under mean and max") {
  Layer<float> two = random_layer<float>({1, 1, 2, 8, 8}, {64}, 8);
  Layer<float> four = random_layer<float>({1, 1, 4, 8, 8}, {64}, 8);
  four.k = two.k;
  four.q = {two.q[0], two.q[0], two.q[1], two.q[1]};
  for (const auto g : {GroupReduction::mean, GroupReduction::max})
    CHECK(difference(scores_of(plain(8, g), four), oracle(plain(8, g), two), {64}, 1) < 1e-5);
}

TEST_CASE("the scorer prints all its parameters") {
  CHECK(specification(score::SnapKV{}) ==
        "snapkv(window=32,rows=mean,pool=max:7,group=mean,order=group-then-pool,protect=half,sinks=0,scratch_limit=0)");
}

}  // namespace
