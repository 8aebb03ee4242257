#include "kvevict/allocate/global.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "common/sharing.hpp"
#include "kvevict/select/nan_score.hpp"

using namespace kvevict;

static_assert(GlobalAllocator<allocate::Global> && !LayerAllocator<allocate::Global>);

namespace {
using V = std::vector<index_t>;
constexpr float inf = std::numeric_limits<float>::infinity();

// Heads of several layers, one after the other in one matrix as wide as the longest.
struct Layers {
  V tokens;
  std::vector<float> scores;
  index_t width = 0;
  Protect protect;
  bool comparable;
  Layers(const std::vector<std::vector<float>>& layers, index_t heads, Protect asked = {}, bool compare = true)
      : protect(asked), comparable(compare) {
    for (const auto& l : layers) width = std::max(width, static_cast<index_t>(l.size()) / heads);
    for (const auto& l : layers)
      for (index_t h = 0; h < heads; ++h) {
        tokens.push_back(static_cast<index_t>(l.size()) / heads);
        const auto first = l.begin() + std::ptrdiff_t{h} * tokens.back();
        scores.insert(scores.end(), first, first + tokens.back());
        scores.resize(tokens.size() * static_cast<std::size_t>(width), 1e30f);  // never read
      }
  }
  V split(const allocate::Global& global, std::int64_t total) const {
    const tests::Sharing sharing(0, tokens, protect, comparable);
    V out(tokens.size(), -1);
    split_rows(host_exec{2}, {scores.data(), static_cast<index_t>(tokens.size()), width, width}, sharing.heads(),
               global.split_all(sharing.heads(), total), out);
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

TEST_CASE("global: a NaN score is an error that names the head of the list and the token") {
  const Layers layers({{1, 2, 3, 4}, {1, 2, 3, std::numeric_limits<float>::quiet_NaN()}}, 2);
  try {
    (void)layers.split({}, 3);
    FAIL("nothing was thrown");
  } catch (const NanScore& nan) {
    CHECK(nan.row == 3);
    CHECK(nan.token == 1);
  }
}
