#include "kvevict/model/decoder.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/error.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;

namespace {

std::vector<index_t> some_tokens(std::size_t count, std::uint32_t seed = 7) {
  std::vector<index_t> out;
  for (std::size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    out.push_back(static_cast<index_t>((seed >> 16) % 50));
  }
  return out;
}

Decoder load(const TinyModel& model) {
  const TempDir dir;
  model.write(dir.path());
  return Decoder(dir.path());
}

std::vector<float> logits_of(const Decoder& d, ForwardState& state, const host_exec& exec = {}) {
  std::vector<index_t> rows(static_cast<std::size_t>(state.tokens));
  std::iota(rows.begin(), rows.end(), 0);
  const index_t v = d.config().vocabulary;
  std::vector<float> out(rows.size() * static_cast<std::size_t>(v));
  d.logits(exec, state, rows, {out.data(), state.tokens, v, v});
  return out;
}

std::vector<float> prefill(const Decoder& d, std::span<const index_t> tokens, RaggedCache<float>& cache,
                           const host_exec& exec = {}, index_t chunk = Decoder::default_chunk) {
  ForwardState state;
  d.feed(exec, tokens, cache, state, NoSink{}, chunk);
  return logits_of(d, state, exec);
}

double worst_difference(const std::vector<float>& ours, const std::vector<std::vector<double>>& reference) {
  double worst = 0;
  std::size_t i = 0;
  for (const auto& row : reference)
    for (const double x : row) worst = std::max(worst, std::abs(static_cast<double>(ours[i++]) - x));
  return i == ours.size() ? worst : std::numeric_limits<double>::infinity();
}

// Prefill of 150 tokens (more than one key tile) against the textbook in double.
void agrees_with_the_textbook(TinyModel model) {
  model.fill();
  const Decoder d = load(model);
  const auto tokens = some_tokens(150);
  RaggedCache<float> cache(d.cache_shape());
  CHECK(worst_difference(prefill(d, tokens, cache), model.reference(tokens)) < 2e-4);
}

}  // namespace

TEST_CASE("prefill agrees with the textbook formulas for every shape of the family") {
  TinyModel m;
  SUBCASE("llama, grouped queries, tied output") {}
  SUBCASE("one query head per KV head") { m.config["num_key_value_heads"] = 6; }
  SUBCASE("one KV head for all") { m.config["num_key_value_heads"] = 1; }
  SUBCASE("an output matrix of its own") { m.config["tie_word_embeddings"] = false; }
  SUBCASE("interleaved RoPE") { m.config["rope_interleaved"] = true; }
  SUBCASE("biases in attention and MLP") {
    m.config["attention_bias"] = true;
    m.config["mlp_bias"] = true;
  }
  SUBCASE("qwen2: biases of q, k and v alone") { m.config["model_type"] = "qwen2"; }
  SUBCASE("qwen3: queries and keys are normalised before RoPE") { m.config["model_type"] = "qwen3"; }
  SUBCASE("mistral") {
    m.config["model_type"] = "mistral";
    m.config["sliding_window"] = nullptr;
  }
  SUBCASE("Llama 3's scaled RoPE") {
    // Wave lengths here are 6.3, 63, 628 and 6283 positions: one stays, one is on the ramp, two are divided.
    m.config["rope_scaling"] = {{"rope_type", "llama3"},
                                {"factor", 8.0},
                                {"low_freq_factor", 1.0},
                                {"high_freq_factor", 4.0},
                                {"original_max_position_embeddings", 100}};
  }
  SUBCASE("a head dimension that fills no vector") { m.config["head_dim"] = 10; }
  agrees_with_the_textbook(m);
}

TEST_CASE("the choices of the config change the result") {
  TinyModel base;
  base.fill();
  const auto tokens = some_tokens(20);
  const Decoder first = load(base);
  RaggedCache<float> cache(first.cache_shape());
  const auto plain = prefill(first, tokens, cache);
  const auto differs = [&](const char* field, const nlohmann::json& value) {
    TinyModel other = base;
    other.config[field] = value;
    const Decoder d = load(other);
    RaggedCache<float> c(d.cache_shape());
    return prefill(d, tokens, c) != plain;
  };
  CHECK(differs("rope_interleaved", true));
  CHECK(differs("rope_theta", 500.0));
  CHECK(differs("rms_norm_eps", 0.1));
  CHECK_FALSE(differs("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 10000.0}}));
  CHECK(differs("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500.0}}));
}

TEST_CASE("decoding token by token, chunks and any number of threads give the bits of one prefill") {
  TinyModel model;
  model.fill();
  const Decoder d = load(model);
  const auto tokens = some_tokens(300);
  RaggedCache<float> whole(d.cache_shape());
  const auto expected = prefill(d, tokens, whole);
  for (const index_t chunk : {1, 7, 128, 299}) {
    RaggedCache<float> cache(d.cache_shape());
    CHECK(prefill(d, tokens, cache, host_exec{chunk == 7 ? 3 : 1}, chunk) == expected);
  }
  RaggedCache<float> cache(d.cache_shape());
  ForwardState state;
  std::vector<float> stepped;
  for (std::size_t i = 0; i < tokens.size(); i += i == 0 ? 290 : 1) {
    d.feed({}, std::span(tokens).subspan(i, i == 0 ? 290 : 1), cache, state);
    const auto l = logits_of(d, state);
    stepped.insert(stepped.end(), l.begin(), l.end());
  }
  CHECK(stepped == expected);
  CHECK(cache.next_position() == 300);
}

TEST_CASE("f16 and bf16 weights, one file or several, load to the same model where the values are exact") {
  TinyModel model;
  model.fill();
  for (auto& [name, tensor] : model.tensors)
    for (float& x : tensor.values) x = to_float(from_float<bf16_t>(to_float(from_float<fp16_t>(x))));
  const auto tokens = some_tokens(30);
  const Decoder plain = load(model);
  RaggedCache<float> cache(plain.cache_shape());
  const auto expected = prefill(plain, tokens, cache);
  const auto check = [&](auto element, int shards) {
    const TempDir dir;
    model.write<decltype(element)>(dir.path(), shards);
    const Decoder d(dir.path());
    RaggedCache<float> c(d.cache_shape());
    CHECK(prefill(d, tokens, c) == expected);
  };
  check(float{}, 3);
  check(fp16_t{}, 1);
  check(fp16_t{}, 4);
  check(bf16_t{}, 2);
}

TEST_CASE("attention over a ragged cache equals full attention in which evicted rows are masked") {
  TinyModel model;
  model.config["num_hidden_layers"] = 1;  // so that evicted rows change nothing but the attention of the new tokens
  model.fill();
  const Decoder d = load(model);
  const auto tokens = some_tokens(200), next = some_tokens(3, 99);
  RaggedCache<float> cache(d.cache_shape());
  prefill(d, tokens, cache);
  // Head 0 keeps nothing, head 1 every third row.
  std::vector<index_t> kept;
  for (index_t i = 0; i < 200; i += 3) kept.push_back(i);
  const std::vector<std::int64_t> offsets{0, 0, static_cast<std::int64_t>(kept.size())};
  RaggedCache<float> full(cache);
  cache.compact(host_exec{}, 0, LayerPlan{{offsets, kept}, {}});

  struct Capture {
    std::vector<float> queries;
    std::vector<float> lse;
    void queries_(Matrix<const float> q, const float* l) {
      for (index_t r = 0; r < q.rows; ++r) queries.insert(queries.end(), q.row(r), q.row(r) + q.cols);
      lse.assign(l, l + 6 * q.rows);
    }
  };
  struct Sink {
    Capture& out;
    void queries(index_t, index_t, Matrix<const float> q, const float* l) { out.queries_(q, l); }
  };
  Capture seen;
  ForwardState state;
  d.feed({}, next, cache, state, Sink{seen});
  CHECK(cache.next_position() == 203);
  CHECK(cache.tokens(0, 0) == 3);
  CHECK(cache.tokens(0, 1) == 70);
  CHECK(cache.positions(0, 1).back() == 202);

  // The same by hand for the last token: log-sum-exp over the rows that are left, from the full cache's keys.
  const float scale = d.config().softmax_scale();
  for (index_t q_head = 0; q_head < 6; ++q_head) {
    const float* q = seen.queries.data() + 2 * 48 + q_head * 8;
    double total = 0;
    const auto add = [&](Rows<const float> keys, index_t row) {
      double s = 0;
      for (index_t c = 0; c < 8; ++c) s += q[c] * keys.at(row, c);
      total += std::exp(s * scale);
    };
    const index_t head = q_head / 3;
    if (head == 1)
      for (const index_t r : kept) add(full.keys(0, 1), r);
    for (index_t r = 0; r < 3; ++r) add(cache.keys(0, head), cache.tokens(0, head) - 3 + r);
    CHECK(seen.lse[static_cast<std::size_t>(q_head * 3 + 2)] == doctest::Approx(std::log(total)).epsilon(1e-5));
  }
}

TEST_CASE("branches see the cache and themselves, not each other, and leave the cache alone") {
  TinyModel model;
  model.fill();
  const Decoder d = load(model);
  const auto context = some_tokens(140), first = some_tokens(9, 3), second = some_tokens(4, 5);
  RaggedCache<float> cache(d.cache_shape());
  prefill(d, context, cache);
  std::vector<index_t> both(first);
  both.insert(both.end(), second.begin(), second.end());
  const std::vector<index_t> offsets{0, 9, 13};
  ForwardState state;
  d.feed_branches({}, {both, offsets}, cache.next_position(), cache, state);
  const auto together = logits_of(d, state);
  CHECK(cache.next_position() == 140);
  std::vector<float> alone;
  for (const auto& branch : {first, second}) {
    RaggedCache<float> copy(cache);
    const auto l = prefill(d, branch, copy);
    alone.insert(alone.end(), l.begin(), l.end());
  }
  REQUIRE(together.size() == alone.size());
  float worst = 0;
  for (std::size_t i = 0; i < alone.size(); ++i) worst = std::max(worst, std::abs(alone[i] - together[i]));
  CHECK(worst < 2e-4f);
}

TEST_CASE("tokens, positions and caches that do not fit are refused, and nothing is appended") {
  TinyModel model;
  model.fill();
  const Decoder d = load(model);
  RaggedCache<float> cache(d.cache_shape());
  ForwardState state;
  const auto feed = [&](std::vector<index_t> tokens) { d.feed({}, tokens, cache, state); };
  CHECK_THROWS_WITH(feed({1, 50}), doctest::Contains("token 1 is 50; the vocabulary has 50 (0 to 49)"));
  CHECK_THROWS_WITH(feed({-1}), doctest::Contains("token 0 is -1"));
  CHECK_THROWS_WITH(feed({}), doctest::Contains("no tokens"));
  CHECK_THROWS_WITH(feed(some_tokens(401)), doctest::Contains("position 400; the model was made for 400 positions"));
  CHECK(cache.next_position() == 0);
  feed(some_tokens(400));
  CHECK_THROWS_WITH(feed({3}), doctest::Contains("position 400"));
  RaggedCache<float> other(CacheShape{2, 2, 6, 8, 8});
  CHECK_THROWS_WITH(d.feed({}, some_tokens(2), other, state), doctest::Contains("the cache has 2 layers"));
  const std::vector<index_t> tokens{1, 2}, bad{0, 0, 2};
  CHECK_THROWS_WITH(d.feed_branches({}, {tokens, bad}, 0, cache, state),
                    doctest::Contains("at least one token a branch"));
  const std::vector<index_t> row{400};
  std::vector<float> out(50);
  CHECK_THROWS_WITH(d.logits({}, state, row, {out.data(), 1, 50, 50}), doctest::Contains("row 400 of the last feed"));
}
