// Wrapping scorers, and chunks as the one that proves them.
#include "kvevict/score/chunks.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kvevict/core/parameters.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/snapkv.hpp"

using namespace kvevict;

static_assert(TokenScorer<score::Chunks<>, float> && TokenScorer<score::Chunks<score::KNorm>, bf16_t> &&
              TokenScorer<score::Chunks<score::Chunks<score::KeyDiff>>, fp16_t>);

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();
using F = std::vector<float>;

// What chunks make of the scores of one head.
F chunked(F scores, index_t size) {
  const float key = 0.f;
  std::vector<Rows<const float>> keys{dense_rows(&key, 1, 1)};
  LayerObservation<float> o;
  o.shape = {1, 1, 1, 1, 1};
  o.keys = keys;
  F buffer(score::Head::buffer_floats(o.shape));
  score::Chunks<score::KNorm>{{}, size}.rescore_head(score::Head(o, 0, buffer.data()), scores);
  return scores;
}

// Two heads of keys [tokens][1], with window queries that all rows answer alike.
struct Layer {
  std::vector<F> keys;
  std::vector<std::vector<index_t>> positions;
  F queries;
  std::vector<index_t> window;
  OwnedObservation<float> observed;

  explicit Layer(std::vector<F> heads) : keys(std::move(heads)), queries{1, 1}, window{8, 9} {
    observed.shape = {1, static_cast<index_t>(keys.size()), static_cast<index_t>(keys.size()), 1, 1};
    observed.softmax_scale = 1.f;
    for (const F& k : keys) {
      const auto tokens = static_cast<index_t>(k.size());
      observed.keys.push_back(dense_rows(k.data(), tokens, 1));
      auto& p = positions.emplace_back();
      for (index_t i = 0; i < tokens; ++i) p.push_back(i);
      observed.window_queries.push_back(dense_rows<const float>(queries.data(), 2, 1));
    }
    observed.window_positions = window;
    for (const auto& p : positions) observed.positions.emplace_back(p);
  }
  template <class S>
  std::vector<F> scores(const S& scorer, int threads = 1) const {
    const LayerObservation<float> o = observed.observation();
    const index_t rows = score_heads(scorer, o.shape), width = o.most_tokens();
    F flat(static_cast<std::size_t>(rows * width));
    score_on(host_exec{threads}, scorer, o, Matrix<float>{flat.data(), rows, width, width});
    std::vector<F> out;
    for (index_t h = 0; h < rows; ++h)
      out.emplace_back(flat.begin() + std::ptrdiff_t{h} * width,
                       flat.begin() + std::ptrdiff_t{h} * width + o.tokens(h));
    return out;
  }
};

}  // namespace

TEST_CASE("every token of a chunk gets the mean of its scores; the last chunk may be short") {
  CHECK(chunked({1, 2, 6, 0, 4}, 2) == F{1.5f, 1.5f, 3, 3, 4});
  CHECK(chunked({1, 2, 6}, 1) == F{1, 2, 6});
  CHECK(chunked({1, 2, 6}, 100) == F{3, 3, 3});
  CHECK(chunked({}, 3).empty());
}

TEST_CASE("rows without a score keep none and count in no mean, and NaN stays where it was") {
  CHECK(chunked({none, 2, none, none}, 2) == F{none, 2, none, none});
  CHECK(chunked({1, none, 5}, 3) == F{3, none, 3});
  const F got = chunked({1, std::nanf(""), 3}, 3);
  CHECK(got[0] == 2);
  CHECK(std::isnan(got[1]));  // the planner names this token, not the chunk's first
  CHECK(got[2] == 2);
  CHECK(chunked({std::numeric_limits<float>::infinity(), 1}, 2)[1] == std::numeric_limits<float>::infinity());
}

TEST_CASE("heads of different lengths are cut from their own first row, for any number of threads") {
  const Layer layer({{1, 3, 5, 7, 9}, {2, 4}});
  const score::Chunks<score::KNorm> scorer{{}, 2};
  const std::vector<F> want{{-2, -2, -6, -6, -9}, {-3, -3}};
  CHECK(layer.scores(scorer) == want);
  CHECK(layer.scores(scorer, 3) == want);
}

TEST_CASE("a wrapper has the needs, window, protection and score rows of what it wraps") {
  score::Chunks<> scorer;
  scorer.base.window = 2;
  scorer.base.sinks = 1;
  scorer.base.group = GroupReduction::none;
  CHECK(needs_of(scorer) == score::SnapKV::needs);
  CHECK(scorer.window_rows() == 2);
  CHECK(scorer.protection().window == 2);
  CHECK(scorer.protection().sinks == 1);
  CHECK(heads_comparable(scorer));
  CHECK_FALSE(heads_comparable(score::Chunks<score::KNorm>{}));
  CHECK(score_heads(scorer, {1, 2, 6, 1, 1}) == 6);
  CHECK(needs_of(score::Chunks<score::Chunks<score::KNorm>>{}) == Needs::keys);
}

TEST_CASE("around a window scorer the window stays without a score") {
  const Layer layer({F(10, 1.f)});
  score::Chunks<> scorer;
  scorer.base.window = 2;
  scorer.base.pool = Pooling::none();
  scorer.size = 3;
  const F plain = layer.scores(scorer.base)[0], got = layer.scores(scorer)[0];
  for (std::size_t t = 0; t < 10; ++t) {
    CHECK((got[t] == none) == (t >= 8));
    if (t < 8)
      CHECK(got[t] ==
            doctest::Approx((plain[t - t % 3] + plain[t - t % 3 + 1] + (t < 6 ? plain[t] : 0)) / (t < 6 ? 3 : 2)));
  }
}

TEST_CASE("a wrapper prints what it wraps, and refuses what neither of the two can take") {
  CHECK(specification(score::Chunks<score::KNorm>{}) == "chunks<knorm(sinks=0,protect=half)>(size=20)");
  const Layer layer({{1, 2, 3}});
  CHECK_THROWS_WITH_AS(layer.scores(score::Chunks<score::KNorm>{{}, 0}), "chunks: size=0; 1 or more rows are required",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(layer.scores(score::Chunks<score::KNorm>{{{{.sinks = -1}}}}), doctest::Contains("sinks=-1"),
                       std::invalid_argument);
  float out[3];
  CHECK_THROWS_WITH_AS(
      score_on(host_exec{}, score::Chunks<score::KNorm>{}, layer.observed.observation(), Matrix<float>{out, 1, 2, 2}),
      "chunks: scores [1][2] asked of layer 0; [1][3] is required", std::invalid_argument);
}
