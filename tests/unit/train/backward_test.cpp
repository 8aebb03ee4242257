#include "kvevict/train/backward.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <utility>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/train/noise.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;

namespace {

// Two contexts of unequal lengths with random rows, each followed by two texts.
struct Scene {
  ModelConfig config;
  FrozenWeights<double> weights;
  std::vector<double> keys[2], values[2], mask[2], grad[2];
  std::vector<index_t> tokens[2] = {{3, 7, 1, 9, 20, 4, 11}, {5, 2, 8, 40}};
  std::vector<index_t> offsets[2] = {{0, 3, 7}, {0, 1, 4}};
  std::vector<double> teachers;
  std::vector<MaskedContext<double, double>> contexts;

  explicit Scene(const std::filesystem::path& folder) : config(read_model_config(folder)), weights(folder, config) {
    const CounterRandom random(5, 0);
    std::uint64_t counter = 0;
    for (int i = 0; i < 2; ++i) {
      const index_t n = i == 0 ? 6 : 9;
      const auto heads = static_cast<std::size_t>(config.layers * config.kv_heads * n);
      const auto size = heads * static_cast<std::size_t>(config.head_dim);
      for (std::size_t j = 0; j < size; ++j) {
        keys[i].push_back(random.normal(counter++));
        values[i].push_back(random.normal(counter++));
      }
      for (std::size_t j = 0; j < heads; ++j) mask[i].push_back(random.uniform(counter++));
      grad[i].assign(heads, 0);
      MaskedContext<double, double> c;
      c.tokens = n;
      c.keys = keys[i].data();
      c.values = values[i].data();
      c.branches = {tokens[i], offsets[i]};
      contexts.push_back(c);
    }
    // The teacher: the same decoder with every row alive.
    MaskedDecoder<double> teacher(config, weights);
    teacher.forward(contexts);
    const std::vector<index_t> rows[2] = {{1, 2, 5, 6}, {0, 3}};
    for (std::size_t i = 0; i < 2; ++i)
      for (const index_t r : rows[i])
        for (index_t l = 0; l < config.layers; ++l) {
          const double* h = teacher.hidden(l, teacher.first_row(i) + r);
          teachers.insert(teachers.end(), h, h + config.hidden);
        }
    std::size_t at = 0;
    for (std::size_t i = 0; i < 2; ++i)
      for (const index_t r : rows[i]) {
        contexts[i].scored.push_back({r, 0.1 + 0.05 * static_cast<double>(at), nullptr});
        contexts[i].scored.back().teacher =
            teachers.data() + at++ * static_cast<std::size_t>(config.layers) * static_cast<std::size_t>(config.hidden);
      }
  }
  // Tokens of the contexts, for dense ones.
  std::vector<index_t> texts[2] = {{8, 1, 30, 12, 6, 2}, {4, 4, 17, 9, 33, 21, 5, 28, 10}};
  void use_dense() {
    for (std::size_t i = 0; i < 2; ++i) contexts[i].dense = texts[i];
  }
  void use_masks() {
    for (std::size_t i = 0; i < 2; ++i) contexts[i].mask = mask[i].data(), contexts[i].grad_mask = grad[i].data();
  }
  double loss(double beta) const {
    MaskedDecoder<double> decoder(config, weights);
    decoder.forward(contexts);
    std::vector<DistillationLoss> losses(2);
    decoder.loss(losses);
    return losses[0].kl + losses[1].kl + beta * (losses[0].hidden + losses[1].hidden);
  }
};

void check_gradients(const TinyModel& model, double beta, bool dense = false) {
  const TempDir dir;
  model.write(dir.path());
  Scene s(dir.path());
  if (dense) s.use_dense();
  s.use_masks();
  MaskedDecoder<double> decoder(s.config, s.weights);
  std::vector<DistillationLoss> losses(2);
  decoder.forward(s.contexts);
  decoder.backward(beta, losses);
  double largest = 0;
  for (const auto& g : s.grad)
    for (const double x : g) largest = std::max(largest, std::abs(x));
  REQUIRE(largest > 1e-4);
  for (std::size_t i = 0; i < 2; ++i)
    for (std::size_t j = 0; j < s.mask[i].size(); j += 3) {
      const double kept = s.mask[i][j], h = 1e-4;
      double sum = 0;
      // Fourth order: the error of the difference stays below that of the arithmetic.
      for (const auto& [step, factor] : {std::pair{-2.0, 1.0}, {-1.0, -8.0}, {1.0, 8.0}, {2.0, -1.0}}) {
        s.mask[i][j] = kept + step * h;
        sum += factor * s.loss(beta);
      }
      s.mask[i][j] = kept;
      CAPTURE(i);
      CAPTURE(j);
      CHECK(std::abs(sum / (12 * h) - s.grad[i][j]) <= 1e-6 * largest);
    }
}

}  // namespace

TEST_CASE("gradients of the masks agree with finite differences, KL and hidden states together") {
  check_gradients(TinyModel().fill(), 0.5);
}

TEST_CASE("gradients of the masks agree with finite differences where the model has biases and norms of heads") {
  TinyModel model;
  model.config["model_type"] = "qwen3";
  model.config["attention_bias"] = true;
  model.config["tie_word_embeddings"] = false;
  check_gradients(model.fill(3), 0);
}

TEST_CASE("gradients agree with finite differences where the queries of the context see the masks too") {
  check_gradients(TinyModel().fill(), 0.5, true);
}

TEST_CASE("gradients of dense contexts agree where the model has biases and norms of heads") {
  TinyModel model;
  model.config["model_type"] = "qwen3";
  model.config["attention_bias"] = true;
  model.config["tie_word_embeddings"] = false;
  check_gradients(model.fill(3), 0, true);
}

TEST_CASE("a dense context with every row alive gives its texts what a prefill gives them") {
  const TempDir dir;
  TinyModel().fill().write(dir.path());
  Scene s(dir.path());
  const Decoder decoder(dir.path());
  const CacheShape shape = decoder.cache_shape();
  for (std::size_t i = 0; i < 2; ++i) {
    RaggedCache<float> cache(shape);
    ForwardState state;
    decoder.feed({}, s.texts[i], cache, state);
    std::size_t at = 0;
    for (index_t l = 0; l < shape.layers; ++l)
      for (index_t h = 0; h < shape.kv_heads; ++h)
        for (index_t t = 0; t < s.contexts[i].tokens; ++t)
          for (index_t c = 0; c < shape.head_dim_k; ++c, ++at) {
            s.keys[i][at] = static_cast<double>(cache.keys(l, h).at(t, c));
            s.values[i][at] = static_cast<double>(cache.values(l, h).at(t, c));
          }
  }
  MaskedDecoder<double> cached(s.config, s.weights), live(s.config, s.weights);
  auto dense = s.contexts;
  for (std::size_t i = 0; i < 2; ++i) dense[i].dense = s.texts[i];
  cached.forward(s.contexts);
  live.forward(dense);
  double largest = 0;
  for (std::size_t i = 0; i < 2; ++i)
    for (index_t r = 0; r < static_cast<index_t>(s.tokens[i].size()); ++r)
      for (index_t c = 0; c < s.config.hidden; ++c) {
        const double want = cached.hidden(shape.layers - 1, cached.first_row(i) + r)[c];
        CHECK(live.hidden(shape.layers - 1, live.first_row(i) + r)[c] == doctest::Approx(want).epsilon(1e-4));
        largest = std::max(largest, std::abs(want));
      }
  CHECK(largest > 0.1);
}

TEST_CASE("a mask of ones has no loss and no gradient") {
  const TempDir dir;
  TinyModel().fill().write(dir.path());
  Scene s(dir.path());
  s.use_masks();
  for (auto& m : s.mask) m.assign(m.size(), 1.0);
  MaskedDecoder<double> decoder(s.config, s.weights);
  std::vector<DistillationLoss> losses(2);
  decoder.forward(s.contexts);
  decoder.backward(0.5, losses);
  for (int i = 0; i < 2; ++i) {
    CHECK(std::abs(losses[static_cast<std::size_t>(i)].kl) < 1e-14);
    CHECK(losses[static_cast<std::size_t>(i)].hidden < 1e-28);
    for (const double g : s.grad[i]) CHECK(std::abs(g) < 1e-12);
  }
}

TEST_CASE("one gradient does not depend on the other contexts of the batch") {
  const TempDir dir;
  TinyModel().fill().write(dir.path());
  Scene s(dir.path());
  s.use_masks();
  MaskedDecoder<double> decoder(s.config, s.weights);
  std::vector<DistillationLoss> both(2), one(1);
  decoder.forward(s.contexts);
  decoder.backward(0.5, both);
  std::vector<double> alone(s.grad[1].size(), 0.0);
  s.contexts[1].grad_mask = alone.data();
  decoder.forward(std::span(s.contexts).subspan(1));
  decoder.backward(0.5, one);
  CHECK(one[0].kl == doctest::Approx(both[1].kl).epsilon(1e-12));
  for (std::size_t j = 0; j < alone.size(); ++j) CHECK(alone[j] == doctest::Approx(s.grad[1][j]).epsilon(1e-9));
}

TEST_CASE("with every row alive it is the decoder of inference") {
  const TempDir dir;
  TinyModel().fill().write(dir.path());
  const Decoder decoder(dir.path());
  const auto shape = decoder.cache_shape();
  RaggedCache<float> cache(shape);
  ForwardState state;
  const std::vector<index_t> context = {1, 4, 9, 16, 25, 36, 49}, texts = {2, 3, 5, 7, 11}, offsets = {0, 2, 5};
  decoder.feed({}, context, cache, state);
  std::vector<float> keys, values;
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h)
      for (index_t t = 0; t < 7; ++t) {
        keys.insert(keys.end(), cache.keys(l, h).row(t), cache.keys(l, h).row(t) + shape.head_dim_k);
        values.insert(values.end(), cache.values(l, h).row(t), cache.values(l, h).row(t) + shape.head_dim_v);
      }
  decoder.feed_branches({}, {texts, offsets}, 7, cache, state);
  const FrozenWeights<float> weights(dir.path(), decoder.config());
  MaskedDecoder<float> masked(decoder.config(), weights);
  MaskedContext<float, float> c;
  c.tokens = 7;
  c.keys = keys.data();
  c.values = values.data();
  c.branches = {texts, offsets};
  masked.forward(std::span(&c, 1));
  for (index_t r = 0; r < 5; ++r)
    for (index_t i = 0; i < decoder.config().hidden; ++i)
      CHECK(masked.hidden(shape.layers - 1, r)[i] == doctest::Approx(state.rows().at(r, i)).epsilon(1e-4));
}
