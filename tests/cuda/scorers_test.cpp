// LKV-T, norm, KeyDiff, position and the softmax of Ada-KV in the emulated block, against the host scorers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "host_cta.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/split_rows.hpp"
#include "kvevict/cpu/token_input.hpp"
#include "kvevict/cuda/detail/simple_steps.hpp"
#include "kvevict/cuda/detail/split_steps.hpp"
#include "kvevict/cuda/detail/token_weights.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/random.hpp"
#include "kvevict/score/row_scorer.hpp"

using namespace kvevict;
using emulation::HostCta;
using emulation::launch;
using emulation::Order;

namespace {

std::vector<float> normal(std::size_t n, unsigned seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> d(0.f, scale);
  std::vector<float> out(n);
  for (auto& x : out) x = d(random);
  return out;
}

// Two heads of keys and values.
template <class T>
struct Layer {
  std::vector<std::vector<T>> data;
  std::vector<std::vector<index_t>> positions;
  OwnedObservation<T> owner;

  Layer(index_t dim_k, index_t dim_v, const std::vector<index_t>& tokens) {
    const auto heads = static_cast<index_t>(tokens.size());
    data.reserve(2 * tokens.size());
    positions.reserve(tokens.size());
    owner.shape = {1, heads, heads, dim_k, dim_v};
    for (index_t h = 0; h < heads; ++h) {
      const index_t t = tokens[static_cast<std::size_t>(h)];
      for (const index_t dim : {dim_k, dim_v}) {
        data.emplace_back();
        for (const float x : normal(static_cast<std::size_t>(t * dim), static_cast<unsigned>(h * 7 + dim), 1.f))
          data.back().push_back(from_float<T>(x + 0.5f));
        (dim == dim_k && owner.keys.size() == static_cast<std::size_t>(h) ? owner.keys : owner.values)
            .push_back(dense_rows<const T>(data.back().data(), t, dim));
      }
      positions.emplace_back();
      for (index_t j = 0; j < t; ++j) positions.back().push_back(3 * j + h);
      owner.positions.push_back(positions.back());
    }
  }
};

void check_close(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
  REQUIRE(got.size() == want.size());
  float largest = 0.f;
  for (const float x : want) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!(std::abs(got[i] - want[i]) <= tolerance * largest)) {
      CHECK_MESSAGE(false, "entry ", i, ": ", got[i], " instead of ", want[i]);
      return;
    }
}

// Tokens of a head through its network, in double.
std::vector<float> network(const TokenNet<const float>& net, const float* inputs, index_t count) {
  std::vector<float> out;
  for (index_t j = 0; j < count; ++j) {
    double score = 0;
    for (index_t u = 0; u < net.hidden; ++u) {
      double x = static_cast<double>(net.b1[u]);
      for (index_t i = 0; i < net.inputs; ++i)
        x += static_cast<double>(inputs[j * net.inputs + i]) * static_cast<double>(net.w1[i * net.hidden + u]);
      score += static_cast<double>(net.w2[u]) * x / (1 + std::exp(-x));
    }
    out.push_back(static_cast<float>(score));
  }
  return out;
}

template <class T, int Blocks, int Tiles>
void check_tokens(index_t dim_k, index_t dim_v, index_t hidden, TokenFeatures features, int chunk_tiles) {
  const std::vector<index_t> tokens{130, 41};
  const Layer<T> layer(dim_k, dim_v, tokens);
  const index_t inputs = dim_k + dim_v + (features == TokenFeatures::distance ? 2 : 0), newest = 3 * 129;
  cuda::TokenWeights<T> weights;
  std::vector<float> want(2 * 130, -1.f), got = want;
  for (index_t h = 0; h < 2; ++h) {
    const auto seed = static_cast<unsigned>(h) + 40u;
    const auto w1 = normal(static_cast<std::size_t>(inputs * hidden), seed, 0.1f);
    const auto b1 = normal(static_cast<std::size_t>(hidden), seed + 1, 0.5f),
               w2 = normal(static_cast<std::size_t>(hidden), seed + 2, 0.3f);
    const TokenNet<const float> net{inputs, hidden, w1.data(), b1.data(), w2.data()};
    cuda::add_head(weights, net, dim_k, dim_v, Blocks);
    const auto i = static_cast<std::size_t>(h);
    std::vector<float> x(static_cast<std::size_t>(tokens[i] * inputs));
    token_inputs(layer.owner.keys[i], layer.owner.values[i], layer.owner.positions[i],
                 TokenFrame{{KeyFrame::post_rope, features}, nullptr, newest}, 0, tokens[i], x.data());
    const auto scores = network(net, x.data(), tokens[i]);
    std::copy(scores.begin(), scores.end(), want.begin() + h * 130);
  }
  std::vector<const index_t*> positions;
  for (const auto& p : layer.positions) positions.push_back(p.data());
  const cuda::TokenArgs<T> args{layer.owner.keys.data(),
                                layer.owner.values.data(),
                                positions.data(),
                                2,
                                newest,
                                weights.key_blocks,
                                weights.value_blocks,
                                features == TokenFeatures::distance,
                                weights.pieces.data(),
                                weights.hidden.data(),
                                weights.row_tiles,
                                cuda::weight_terms<T>,
                                2,
                                chunk_tiles,
                                got.data(),
                                130};
  const int per_block = 2 * 2 * Tiles * 8;
  launch({cuda::ceil_div(130, per_block), 2, 1}, 64, cuda::token_shared_bytes(args, Blocks, Tiles, 2), Order::shuffled,
         [&](HostCta& cta, void* shared) {
           cuda::score_tokens<T, Blocks, Tiles>(cta, args, static_cast<unsigned char*>(shared));
         });
  check_close(got, want, 1e-5f);
}

template <class T>
std::vector<float> key_scores(const Layer<T>& layer, index_t width, bool directions, std::int32_t* largest) {
  const auto heads = static_cast<index_t>(layer.owner.keys.size());
  const index_t dim = layer.owner.shape.head_dim_k, parts = 3;
  std::vector<float> out(static_cast<std::size_t>(heads * width), -5.f),
      partial(static_cast<std::size_t>(heads * parts * dim), -1.f);
  const cuda::KeyArgs<T> args{layer.owner.keys.data(), out.data(), width, largest, partial.data(), parts};
  const auto run = [&](std::size_t bytes, auto&& body) {
    launch({parts, heads, 1}, 64, bytes, Order::shuffled,
           [&](HostCta& cta, void* s) { body(cta, static_cast<float*>(s)); });
  };
  if (!directions) {
    run(0, [&](HostCta& cta, float*) { cuda::score_norms(cta, args); });
  } else {
    run(static_cast<std::size_t>(4 * dim) * sizeof(float),
        [&](HostCta& cta, float* s) { cuda::sum_directions(cta, args, s); });
    run(static_cast<std::size_t>(dim) * sizeof(float),
        [&](HostCta& cta, float* s) { cuda::score_directions(cta, args, s); });
  }
  return out;
}

template <class T, class Scorer>
std::vector<float> on_host(const Layer<T>& layer, const Scorer& scorer, index_t width) {
  const auto heads = static_cast<index_t>(layer.owner.keys.size());
  std::vector<float> out(static_cast<std::size_t>(heads * width), -5.f);
  score_on(host_exec{}, scorer, layer.owner.observation(), Matrix<float>{out.data(), heads, width, width});
  return out;
}

// Reads everything there is in a row.
struct Everything : score::HeadScorer {
  static constexpr std::string_view name = "everything";
  static constexpr Needs needs = Needs::keys | Needs::values | Needs::positions;
  template <class Row>
  KVEVICT_HOST_DEVICE float score_row(const Row& row) const {
    float sum = static_cast<float>(row.position + 100 * row.index - row.head);
    for (index_t i = 0; i < row.key.size(); ++i) sum += row.key[i];
    for (index_t i = 0; i < row.value.size(); ++i) sum -= row.value[i] * row.value[i];
    return sum;
  }
};

}  // namespace

TEST_CASE("CUDA LKV-T scores are those of the network, for every element type, width and feature set") {
  check_tokens<fp16_t, 4, 2>(64, 64, 32, TokenFeatures::none, 2);
  check_tokens<fp16_t, 4, 2>(64, 40, 21, TokenFeatures::distance, 1);  // padding units, staged in parts
  check_tokens<bf16_t, 2, 4>(32, 32, 16, TokenFeatures::distance, 4);
  check_tokens<float, 4, 2>(16, 24, 40, TokenFeatures::none, 4);
}

TEST_CASE("CUDA key norms and KeyDiff scores equal the host's") {
  std::int32_t largest = -cuda::infinity_key;
  const Layer<fp16_t> half(64, 8, {100, 7, 0});
  check_close(key_scores(half, 100, false, &largest), on_host(half, score::KNorm{}, 100), 1e-6f);
  check_close(key_scores(half, 100, true, nullptr), on_host(half, score::KeyDiff{}, 100), 2e-6f);
  const Layer<float> odd(36, 8, {60, 33});
  check_close(key_scores(odd, 60, false, nullptr), on_host(odd, score::KNorm{}, 60), 1e-6f);
  check_close(key_scores(odd, 60, true, nullptr), on_host(odd, score::KeyDiff{}, 60), 2e-6f);
  float best = -std::numeric_limits<float>::infinity();
  const auto norms = key_scores(half, 100, false, nullptr);
  for (std::size_t i = 0; i < 107; ++i) best = std::max(best, norms[i]);
  CHECK(cuda::score_of_key(largest) == best);
}

TEST_CASE("CUDA position scores and protect=score give the sinks the layer's largest score + 1") {
  Layer<float> layer(8, 8, {20, 3});
  score::Position scorer;
  scorer.protect = ProtectShare::score;
  const std::vector<index_t> tokens{20, 3};
  std::vector<float> out(40, -5.f);
  std::int32_t largest = -cuda::infinity_key;
  const cuda::RowArgs args{tokens.data(), nullptr, out.data(), 20, &largest};
  launch({2, 2, 1}, 32, 0, Order::backward, [&](HostCta& cta, void*) { cuda::score_positions(cta, args, 2); });
  launch({2, 1, 1}, 32, 0, Order::backward, [&](HostCta& cta, void*) { cuda::raise_sinks(cta, args, scorer.sinks); });
  CHECK(out == on_host(layer, scorer, 20));
}

TEST_CASE("a scorer of single rows scores alike on both sides, for dense and for transposed rows") {
  Layer<fp16_t> layer(12, 8, {50, 7, 0});
  auto& keys = layer.owner.keys[0];  // the same elements, read as [12][50]
  keys = {keys.data, 50, 12, 1, 50};
  std::vector<const index_t*> positions;
  for (const auto& p : layer.positions) positions.push_back(p.data());
  const std::vector<index_t> tokens{50, 7, 0};
  const auto scored = [&](const auto& scorer) {
    std::vector<float> out(150, -1.f);
    std::int32_t largest = -cuda::infinity_key;
    const cuda::RowScorerArgs<fp16_t> args{layer.owner.keys.data(),
                                           layer.owner.values.data(),
                                           positions.data(),
                                           tokens.data(),
                                           0,
                                           2,
                                           out.data(),
                                           50,
                                           &largest};
    launch({2, 3, 1}, 32, 0, Order::shuffled, [&](HostCta& cta, void*) { cuda::score_rows(cta, args, scorer); });
    float best = -std::numeric_limits<float>::infinity();
    for (std::size_t h = 0; h < 3; ++h)
      for (index_t t = 0; t < tokens[h]; ++t) best = std::max(best, out[h * 50 + static_cast<std::size_t>(t)]);
    CHECK(cuda::score_of_key(largest) == best);
    return out;
  };
  const auto on_both = [&](const auto& scorer) {
    const std::vector<float> device = scored(scorer), host = on_host(layer, scorer, 50);
    for (std::size_t i = 0; i < 150; ++i)
      if (static_cast<index_t>(i % 50) < tokens[i / 50]) CHECK(device[i] == host[i]);
  };
  on_both(Everything{});
  on_both(score::Random{});
}

TEST_CASE("the softmax that makes heads comparable is the host's") {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> scores = normal(200, 3, 4.f), out(200, -1.f), want(200, -1.f);
  scores[5] = -infinity;
  scores[150] = infinity;
  const std::vector<index_t> tokens{100, 90};
  const cuda::SoftmaxArgs args{tokens.data(), scores.data(), out.data(), 100};
  launch({2, 1, 1}, 64, sizeof(cuda::SoftmaxShared), Order::shuffled, [&](HostCta& cta, void* shared) {
    cuda::log_softmax_row(cta, args, *static_cast<cuda::SoftmaxShared*>(shared));
  });
  const std::vector<IndexRange> ranges{{0, tokens[0]}, {0, tokens[1]}};
  detail::log_softmax(host_exec{}, {scores.data(), 2, 100, 100}, ranges, {want.data(), 2, 100, 100});
  for (std::size_t i = 0; i < 200; ++i) CHECK((out[i] == want[i] || std::abs(out[i] - want[i]) < 1e-5f));
}

TEST_CASE("keys before RoPE: rows are rotated back as the host rotates them") {
  const Layer<fp16_t> layer(16, 8, {70});
  const std::vector<float> inv_freq{1.f, 0.3f, 0.1f, 0.02f, 0.004f, 1e-4f};
  for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved}) {
    const index_t newest = 3 * 69;
    Rope rope;
    rope.style = style;
    rope.rotary_dim = 12;
    rope.inv_freq = inv_freq;
    rope.attention_factor = 1.25f;
    std::vector<float> coarse(12 * (newest / 64 + 1)), fine(12 * 64), got(70 * 16), want(70 * 24);
    const cuda::RotationArgs rotations{
        inv_freq.data(), 6, style == RopeStyle::interleaved, 1.25f, coarse.data(), fine.data(), newest / 64 + 1};
    launch({cuda::ceil_div(6 * (newest / 64 + 1 + 64), 64), 1, 1}, 64, 0, Order::forward,
           [&](HostCta& cta, void*) { cuda::fill_rotations(cta, rotations); });
    launch({cuda::ceil_div(70 * 16, 64), 1, 1}, 64, 0, Order::forward, [&](HostCta& cta, void*) {
      cuda::widen_rows(cta, layer.owner.keys[0], layer.positions[0].data(), &rotations, got.data());
    });
    const InverseRotation host(rope, newest);
    token_inputs(layer.owner.keys[0], layer.owner.values[0], layer.owner.positions[0],
                 TokenFrame{{KeyFrame::pre_rope, TokenFeatures::none}, &host, newest}, 0, 70, want.data());
    for (std::size_t r = 0; r < 70; ++r)
      for (std::size_t c = 0; c < 16; ++c) CHECK(std::abs(got[r * 16 + c] - want[r * 24 + c]) < 2e-6f);
  }
}
