// What a pass shows to scorers (model/capture.hpp), and what the recorder writes of it (model/recorder.hpp).
#include "kvevict/model/capture.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/model/recorder.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;

namespace {

std::vector<index_t> some_tokens(index_t count) {
  std::vector<index_t> out;
  for (index_t i = 0; i < count; ++i) out.push_back((i * i * 7 + i * 3) % 50);
  return out;
}

Decoder tiny() {
  TinyModel model;
  model.fill();
  const TempDir dir;
  model.write(dir.path());
  return Decoder(dir.path());
}

// Every query of the pass before and after RoPE, [layer] of [token][q_heads * head_dim].
struct Everything {
  std::vector<std::vector<float>>&before, &after;
  void before_rope(index_t layer, index_t, Matrix<const float> q) { add(before, layer, q); }
  void queries(index_t layer, index_t, Matrix<const float> q, const float*) { add(after, layer, q); }
  static void add(std::vector<std::vector<float>>& out, index_t layer, Matrix<const float> q) {
    out.resize(static_cast<std::size_t>(layer) + 1);
    for (index_t r = 0; r < q.rows; ++r)
      out[static_cast<std::size_t>(layer)].insert(out[static_cast<std::size_t>(layer)].end(), q.row(r),
                                                  q.row(r) + q.cols);
  }
};

}  // namespace

TEST_CASE("window, statistics, attention sums and projection of a pass are those worked out by hand") {
  const Decoder d = tiny();
  const auto tokens = some_tokens(140);
  RaggedCache<float> full(d.cache_shape()), cache(d.cache_shape());
  ForwardState state;
  std::vector<std::vector<float>> before, after;
  d.feed({}, tokens, full, state, Everything{before, after});

  CaptureOptions options;
  options.window = 5;
  options.statistics = options.column_sums = options.output_projection = true;
  index_t seen = 0;
  const auto check = [&](const LayerObservation<float>& o) {
    REQUIRE(o.layer == seen++);
    const auto l = static_cast<std::size_t>(o.layer);
    REQUIRE(o.window_queries.size() == 6);
    CHECK(o.window_positions.front() == 135);
    CHECK(o.window_positions.back() == 139);
    CHECK(o.window_queries[4].at(3, 2) == after[l][138 * 48 + 4 * 8 + 2]);
    CHECK(o.tokens(1) == 140);
    CHECK(o.positions[1][139] == 139);
    CHECK(o.rope.inv_freq.size() == 4);
    CHECK(o.extras.q_stats_first == 4);

    double mean = 0, other = 0, product = 0;  // query head 2, dimensions 1 and 5, tokens from 4 on
    for (std::size_t i = 4; i < 140; ++i) {
      const double a = static_cast<double>(before[l][i * 48 + 17]), b = static_cast<double>(before[l][i * 48 + 21]);
      mean += a / 136, other += b / 136, product += a * b / 136;
    }
    CHECK(o.extras.q_mean[0].at(2, 1) == doctest::Approx(mean).epsilon(1e-5));
    CHECK(o.extras.q_cov[2].at(1, 5) == doctest::Approx(product - mean * other).epsilon(1e-5));
    CHECK(o.extras.q_cov[2].at(5, 1) == o.extras.q_cov[2].at(1, 5));

    std::vector<double> sums(140);  // query head 5, which reads KV head 1
    const auto keys = full.keys(o.layer, 1);
    for (index_t i = 0; i < 140; ++i) {
      std::vector<double> e;
      double total = 0;
      for (index_t j = 0; j <= i; ++j) {
        double s = 0;
        for (index_t c = 0; c < 8; ++c)
          s += static_cast<double>(after[l][static_cast<std::size_t>(i * 48 + 40 + c)] * keys.at(j, c));
        total += e.emplace_back(std::exp(s / std::sqrt(8.)));
      }
      for (std::size_t j = 0; j < e.size(); ++j) sums[j] += e[j] / total;
      if (i == 137) CHECK(o.extras.lse[5 * 5 + 2] == doctest::Approx(std::log(total)).epsilon(1e-5));
    }
    double worst = 0;
    for (index_t j = 0; j < 140; ++j)
      worst = std::max(
          worst, std::abs(static_cast<double>(o.extras.attn_sum[0].at(5, j)) - sums[static_cast<std::size_t>(j)]));
    CHECK(worst < 1e-4);
    std::vector<float> row(48);
    d.weights().layers[l].o.row(7, row.data());
    CHECK(o.extras.o_proj.at(7, 11) == row[11]);
  };
  d.feed({}, tokens, cache, state, LayerCapture({}, d, cache, 140, options, check), 32);
  CHECK(seen == 3);
}

TEST_CASE("chunks and threads change no bit of what is captured") {
  const Decoder d = tiny();
  const auto tokens = some_tokens(150);
  CaptureOptions options;
  options.window = 40;
  options.statistics = options.column_sums = true;
  const auto capture = [&](index_t chunk, int threads) {
    std::vector<float> all;
    RaggedCache<float> cache(d.cache_shape());
    ForwardState state;
    const host_exec exec{threads};
    d.feed(exec, tokens, cache, state,
           LayerCapture(exec, d, cache, 150, options,
                        [&](const LayerObservation<float>& o) {
                          for (const auto& q : o.window_queries) detail::append_rows(all, q);
                          all.insert(all.end(), o.extras.lse.begin(), o.extras.lse.end());
                          detail::append_rows(all, o.extras.q_mean[0]);
                          detail::append_rows(all, o.extras.q_cov[5]);
                          detail::append_rows(all, o.extras.attn_sum[0]);
                        }),
           chunk);
    return all;
  };
  const auto whole = capture(512, 1);
  CHECK(capture(512, 3) == whole);
  CHECK(capture(13, 2) == whole);
  CHECK(capture(128, 1) == whole);
}

TEST_CASE("a recording reads back as the run: rows, queries, positions and extras") {
  const Decoder d = tiny();
  const auto tokens = some_tokens(40);
  const TempDir dir;
  RecordOptions options;
  options.prompt_len = 30;
  options.window = 6;
  options.layers = {0, 2};
  options.attention_sums = options.query_statistics = options.output_projection = true;
  options.model = "tiny";
  record<float>({}, d, tokens, options, dir / "dump.safetensors");

  const Dump<float> dump(dir / "dump.safetensors");
  CHECK(dump.info().model == "tiny");
  CHECK(dump.info().layers == std::vector<index_t>{0, 2});
  CHECK(dump.info().prompt_len == 30);
  CHECK(dump.info().token_ids == tokens);
  CHECK(dump.info().q_positions.size() == 16);
  CHECK(dump.info().q_positions.front() == 24);
  CHECK(dump.info().q_stats_first == 4);
  RaggedCache<float> cache(d.cache_shape());
  ForwardState state;
  std::vector<std::vector<float>> before, after;
  d.feed({}, tokens, cache, state, Everything{before, after});
  CHECK(dump.cache().keys(1, 1).at(29, 3) == cache.keys(2, 1).at(29, 3));
  CHECK(dump.cache().values(0, 0).at(7, 5) == cache.values(0, 0).at(7, 5));
  const auto seen = observe_layer(dump, 1);
  CHECK(seen.window_queries[5].at(0, 1) == after[2][24 * 48 + 41]);
  CHECK(seen.future_queries[5].at(9, 1) == after[2][39 * 48 + 41]);
  CHECK(seen.observation().extras.attn_sum[0].rows == 6);
  CHECK(seen.observation().extras.o_proj.rows == 24);
  double mass = 0;  // each of the 30 prompt queries gives away a mass of 1
  for (index_t j = 0; j < 30; ++j) mass += static_cast<double>(seen.observation().extras.attn_sum[0].at(3, j));
  CHECK(mass == doctest::Approx(30).epsilon(1e-5));
}

TEST_CASE("all prompt queries and half precision are a matter of options; nothing is kept that was not asked for") {
  const Decoder d = tiny();
  const TempDir dir;
  RecordOptions options;
  options.prompt_len = 20;
  options.all_queries = true;
  record({}, d, some_tokens(20), options, dir / "dump.safetensors");
  const Dump<fp16_t> dump(dir / "dump.safetensors");
  CHECK(dump.info().q_positions.size() == 20);
  CHECK(dump.info().shape.layers == 3);
  CHECK(dump.extra(0, "attn_sum") == nullptr);
  CHECK(dump.extra(0, "q_cov") == nullptr);
}

TEST_CASE("a recording that cannot be made is refused and leaves no file") {
  const Decoder d = tiny();
  const TempDir dir;
  const auto refuse = [&](auto change) {
    RecordOptions options;
    options.prompt_len = 10;
    change(options);
    record({}, d, some_tokens(12), options, dir / "dump.safetensors");
  };
  CHECK_THROWS_WITH(refuse([](auto& o) { o.prompt_len = 13; }), doctest::Contains("prompt_len 13; 1 to 12"));
  CHECK_THROWS_WITH(refuse([](auto& o) { o.layers = {1, 1}; }), doctest::Contains("layer 1; ascending"));
  CHECK_THROWS_WITH(refuse([](auto& o) { o.layers = {3}; }),
                    doctest::Contains("layer 3; ascending numbers from 0 to 2"));
  CHECK_THROWS_WITH(refuse([](auto& o) { o.window = 0; }), doctest::Contains("window of 0"));
  CHECK_THROWS_WITH(refuse([](auto& o) { o.query_statistics = true, o.statistics_first = 10; }),
                    doctest::Contains("from token 10 on"));
  RecordOptions options;
  options.prompt_len = 1;
  CHECK_THROWS_WITH(record({}, d, std::vector<index_t>{1, 99}, options, dir / "dump.safetensors"),
                    doctest::Contains("is 99; the vocabulary has 50"));
  CHECK(dir.files() == 0);
}
