#include "kvevict/allocate/global.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

using namespace kvevict;

static_assert(GlobalAllocator<allocate::Global> && !LayerAllocator<allocate::Global>);

namespace {
using V = std::vector<index_t>;
constexpr float inf = std::numeric_limits<float>::infinity();

struct Layers {
  std::vector<std::vector<float>> scores;  // [layers][heads * tokens]
  std::vector<V> tokens;
  std::vector<LayerScores> views;
  Layers(std::vector<std::vector<float>> values, index_t heads, Protect protect = {}, bool comparable = true)
      : scores(std::move(values)) {
    for (const auto& s : scores)
      tokens.emplace_back(static_cast<std::size_t>(heads), static_cast<index_t>(s.size()) / heads);
    for (std::size_t l = 0; l < scores.size(); ++l)
      views.push_back({static_cast<index_t>(l),
                       {scores[l].data(), heads, tokens[l][0], tokens[l][0]},
                       tokens[l],
                       protect,
                       comparable});
  }
  V split(const allocate::Global& global, std::int64_t total) const {
    const auto heads = static_cast<index_t>(tokens[0].size()), layers = static_cast<index_t>(views.size());
    std::int64_t full = 0;
    for (const auto& t : tokens) full += std::accumulate(t.begin(), t.end(), std::int64_t{0});
    V out(static_cast<std::size_t>(heads * layers), -1);
    Audit audit;
    global.allocate_all(host_exec{2}, views, {total, full}, {out.data(), layers, heads, heads}, audit);
    return out;
  }
};
}  // namespace

TEST_CASE("global: the best rows anywhere, empty heads included") {
  const Layers layers({{9, 8, 1, 0, 0, 0}, {7, 6, 5, 4, 0, 0}}, 2);  // two layers of two heads of three tokens
  CHECK(layers.split({}, 4) == V{2, 0, 2, 0});
  CHECK(layers.split({}, 0) == V{0, 0, 0, 0});
  CHECK(layers.split({1}, 4) == V{1, 1, 1, 1});
  CHECK(layers.split({1}, 6) == V{2, 1, 2, 1});
  CHECK(layers.split({}, 12) == V{3, 3, 3, 3});
  CHECK_THROWS_AS(layers.split({1}, 3), std::invalid_argument);
  CHECK_THROWS_AS(layers.split({-1}, 3), std::invalid_argument);
}

TEST_CASE("global: layers of different lengths, ties to the lower layer") {
  const Layers layers({{1, 1}, {1, 1, 1, 1}}, 1);
  CHECK(layers.split({}, 3) == V{2, 1});
}

TEST_CASE("global: protected rows are set aside where every head can have one") {
  const Layers layers({{9, 8, 7, -inf}, {1, 1, 1, -inf}}, 1, {0, 1, ProtectShare::half});
  CHECK(layers.split({}, 4) == V{3, 1});
  CHECK(layers.split({}, 1) == V{1, 0});
}

TEST_CASE("global: scores that are not comparable are normalised by softmax per head") {
  const std::vector<std::vector<float>> scores{{100, 100, 100, 100}, {9, 9, 0, 0}};
  CHECK(Layers(scores, 1).split({}, 4) == V{4, 0});
  CHECK(Layers(scores, 1, {}, false).split({}, 4) == V{2, 2});
  CHECK(Layers(scores, 1, {}, false).split({0, Normalize::none}, 4) == V{4, 0});
}

TEST_CASE("global: a NaN score is an error that names layer, head and token") {
  const Layers layers({{1, 2, 3, 4}, {1, 2, 3, std::numeric_limits<float>::quiet_NaN()}}, 2);
  CHECK_THROWS_WITH_AS(layers.split({}, 3), "global: the score of layer 1, head 1, token 1 is NaN", std::domain_error);
}
