// position, knorm, keydiff and random: scorers that need no queries.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/random.hpp"

using namespace kvevict;

static_assert(TokenScorer<score::Position, float> && TokenScorer<score::KNorm, fp16_t> &&
              TokenScorer<score::KeyDiff, bf16_t> && TokenScorer<score::Random, float>);
static_assert(!TokenScorer<Protect, float>);

namespace {

constexpr float untouched = -77.f;

// A layer of keys [heads][tokens of the head][dim] that owns its rows.
template <class T>
struct Keys {
  std::vector<std::vector<T>> data;
  std::vector<std::vector<index_t>> positions;
  OwnedObservation<T> layer;
  Keys(const std::vector<std::vector<float>>& heads, index_t dim, index_t layer_index = 0) {
    layer.shape = {1, static_cast<index_t>(heads.size()), static_cast<index_t>(heads.size()), dim, dim};
    layer.layer = layer_index;
    for (const auto& head : heads) {
      std::vector<T> rows;
      for (const float x : head) rows.push_back(from_float<T>(x));
      const auto tokens = static_cast<std::int64_t>(rows.size()) / dim;
      data.push_back(std::move(rows));
      layer.keys.push_back(dense_rows(static_cast<const T*>(data.back().data()), tokens, dim));
      auto& p = positions.emplace_back();
      for (index_t i = 0; i < tokens; ++i) p.push_back(3 * i);
    }
    for (const auto& p : positions) layer.positions.emplace_back(p);
  }
  template <class S>
  std::vector<std::vector<float>> scores(const S& scorer, int threads = 1) const {
    const auto o = layer.observation();
    const index_t heads = o.shape.kv_heads, width = o.most_tokens() + 1;
    std::vector<float> flat(static_cast<std::size_t>(heads * width), untouched);
    score_on(host_exec{threads}, scorer, o, Matrix<float>{flat.data(), heads, width, width});
    std::vector<std::vector<float>> out;
    for (index_t h = 0; h < heads; ++h) {
      const auto first = flat.begin() + std::ptrdiff_t{h} * width;
      for (auto it = first + o.tokens(h); it != first + width; ++it) CHECK(*it == untouched);
      out.emplace_back(first, first + o.tokens(h));
    }
    return out;
  }
};
using F = std::vector<std::vector<float>>;

}  // namespace

TEST_CASE("position scores a row by its index and protects four sinks") {
  const Keys<float> keys({{1, 1, 1}, {5}}, 1);
  CHECK(keys.scores(score::Position{}) == F{{0, 1, 2}, {0}});
  CHECK(score::Position{}.protection().sinks == 4);
  CHECK(score::Position{}.protection().window == 0);
  CHECK(keys.scores(score::Position{{.sinks = 2, .protect = ProtectShare::score}}) == F{{3, 3, 2}, {3}});
}

TEST_CASE("knorm is the negative length of the key") {
  const Keys<float> keys({{3, 4, 0, 0, -6, 8}, {1, 0}}, 2);
  CHECK(keys.scores(score::KNorm{}) == F{{-5, -0.f, -10}, {-1}});
  CHECK(keys.scores(score::KNorm{{.sinks = 1, .protect = ProtectShare::score}}) ==
        F{{1, -0.f, -10}, {1}});  // largest 0, plus 1
  CHECK_FALSE(heads_comparable(score::KNorm{}));
}

TEST_CASE("keydiff is the negative cosine with the mean direction") {
  // Unit keys (1,0) and (0,1): the anchor is (0.5, 0.5), both cosines are 1/sqrt(2).
  const Keys<float> keys({{2, 0, 0, 7}, {1, 0, 1, 0}, {0, 0, 3, 0}}, 2);
  const F got = keys.scores(score::KeyDiff{});
  CHECK(got[0][0] == doctest::Approx(-std::sqrt(0.5)));
  CHECK(got[0][1] == doctest::Approx(-std::sqrt(0.5)));
  CHECK(got[1][0] == doctest::Approx(-1));
  CHECK(got[2][0] == 0);  // a zero key
  CHECK(got[2][1] == doctest::Approx(-1));
  CHECK(heads_comparable(score::KeyDiff{}));
}

TEST_CASE("random follows from seed, layer, head and position alone") {
  // SplitMix64 of state 0, as published.
  CHECK(detail::splitmix64(0) == 0xe220a8397b1dcdafu);
  const std::vector<std::vector<float>> rows(2, std::vector<float>(5, 1.f));
  const F a = Keys<float>(rows, 1).scores(score::Random{});
  CHECK(a == Keys<bf16_t>(rows, 1).scores(score::Random{}));
  CHECK(a != Keys<float>(rows, 1).scores(score::Random{{}, 1}));
  CHECK(a != Keys<float>(rows, 1, 1).scores(score::Random{}));
  CHECK(a[0] != a[1]);
  const std::uint64_t key = detail::splitmix64(std::uint64_t{1} << 32 ^ 6u);  // layer 0, head 1, position 3 * 2
  CHECK(a[1][2] == static_cast<float>(detail::splitmix64(key) >> 40) / 16777216.f);
  for (const auto& head : a)
    for (const float s : head) CHECK((s >= 0 && s < 1));
}

TEST_CASE("layout, element type and threads change no bit of a key score") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const index_t heads = 3, tokens = 45, dim = 37;
  std::vector<std::vector<float>> values(heads);
  for (auto& head : values)
    for (index_t i = 0; i < tokens * dim; ++i) head.push_back(to_float(from_float<bf16_t>(normal(random))));
  const Keys<float> keys(values, dim);
  const auto compare = [&](const auto& scorer) {
    const F want = keys.scores(scorer);
    CHECK(keys.scores(scorer, 3) == want);
    CHECK(Keys<bf16_t>(values, dim).scores(scorer) == want);

    Keys<float> transposed(values, dim), blocked(values, dim);
    std::vector<std::vector<float>> columns(heads), blocks(heads);
    std::vector<index_t> table;  // blocks of 8 rows in reverse order
    for (index_t b = 5; b >= 0; --b) table.push_back(b);
    for (std::size_t h = 0; h < heads; ++h) {
      columns[h].resize(static_cast<std::size_t>(tokens * dim));
      blocks[h].resize(static_cast<std::size_t>(48 * dim));
      for (index_t r = 0; r < tokens; ++r)
        for (index_t c = 0; c < dim; ++c) {
          const float x = values[h][static_cast<std::size_t>(r * dim + c)];
          columns[h][static_cast<std::size_t>(c * tokens + r)] = x;
          blocks[h][static_cast<std::size_t>((table[static_cast<std::size_t>(r / 8)] * 8 + r % 8) * dim + c)] = x;
        }
      transposed.layer.keys[h] = {columns[h].data(), tokens, dim, 1, tokens};
      blocked.layer.keys[h] = {blocks[h].data(), tokens, dim, dim, 1, table.data(), 8, 8 * dim};
    }
    CHECK(transposed.scores(scorer) == want);
    CHECK(blocked.scores(scorer) == want);
  };
  compare(score::KNorm{});
  compare(score::KeyDiff{});
}

TEST_CASE("key scores agree with float64 within 1e-5") {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  const index_t dim = 128, tokens = 300;
  std::vector<float> head;
  for (index_t i = 0; i < tokens * dim; ++i) head.push_back(normal(random) + (i % dim == 5 ? 4.f : 0.f));
  const Keys<float> keys({head}, dim);
  std::vector<double> norms, anchor(dim, 0.0);
  for (index_t r = 0; r < tokens; ++r) {
    double sum = 0;
    for (index_t c = 0; c < dim; ++c)
      sum += std::pow(static_cast<double>(head[static_cast<std::size_t>(r * dim + c)]), 2);
    norms.push_back(std::sqrt(sum));
    for (std::size_t c = 0; c < dim; ++c)
      anchor[c] += static_cast<double>(head[static_cast<std::size_t>(r) * dim + c]) / norms.back() / tokens;
  }
  double length = 0;
  for (const double a : anchor) length += a * a;
  const F knorm = keys.scores(score::KNorm{}), keydiff = keys.scores(score::KeyDiff{});
  for (std::size_t r = 0; r < tokens; ++r) {
    double product = 0;
    for (std::size_t c = 0; c < dim; ++c) product += anchor[c] * static_cast<double>(head[r * dim + c]);
    CHECK(knorm[0][r] == doctest::Approx(-norms[r]).epsilon(1e-6));
    CHECK(std::abs(static_cast<double>(keydiff[0][r]) + product / norms[r] / std::sqrt(length)) < 2e-7);
  }
}

TEST_CASE("lengths 0 and 1, and a head without rows, are legal") {
  const Keys<float> keys({{}, {3, 4}}, 2);
  CHECK(keys.scores(score::KNorm{}) == F{{}, {-5}});
  CHECK(keys.scores(score::KeyDiff{})[1][0] == doctest::Approx(-1));
  CHECK(keys.scores(score::Position{{.sinks = 4, .protect = ProtectShare::score}}) == F{{}, {1}});
  CHECK(keys.scores(score::Random{})[0].empty());
  const Keys<float> none({{}, {}}, 2);
  CHECK(none.scores(score::KeyDiff{{.sinks = 1, .protect = ProtectShare::score}}) == F{{}, {}});
}

TEST_CASE("simple scorers refuse a call that does not fit, naming themselves") {
  const Keys<float> keys({{1, 2, 3}}, 1);
  std::vector<float> out(3);
  const auto o = keys.layer.observation();
  CHECK_THROWS_WITH_AS(score_on(host_exec{}, score::KNorm{}, o, Matrix<float>{out.data(), 1, 2, 2}),
                       "knorm: scores [1][2] asked of layer 0; [1][3] is required", std::invalid_argument);
  CHECK_THROWS_AS(score_on(host_exec{}, score::Position{{.sinks = -1}}, o, Matrix<float>{out.data(), 1, 3, 3}),
                  std::invalid_argument);
  Keys<float> lacking({{1, 2, 3}}, 1);
  lacking.layer.positions.clear();
  CHECK_THROWS_AS(lacking.scores(score::Random{}), std::invalid_argument);
}
