// What score_on() refuses, whichever scorer is called: inputs that are missing, do not fit or make no sense.
#include "kvevict/score/check_scoring.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/cpu/expected_attention.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/score/head_scorer.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/oracle.hpp"
#include "kvevict/score/snapkv.hpp"

using namespace kvevict;

namespace {

// One head of four rows with everything that a scorer may ask for; tests damage it.
struct Layer {
  std::vector<float> rows{1, 0, 0, 1, 1, 1, 2, 0}, covariance{1, 0, 0, 1}, frequencies{1};
  std::vector<index_t> positions{0, 1, 2, 3}, window{2, 3};
  OwnedObservation<float> o;

  Layer() {
    const float* data = rows.data();
    o.shape = {1, 1, 1, 2, 2};
    o.layer = 7;
    o.softmax_scale = 0.5f;
    o.rope = {RopeStyle::half, 2, frequencies, 1.f};
    o.keys = {dense_rows(data, 4, 2)};
    o.values = {dense_rows(data, 4, 2)};
    o.positions = {positions};
    o.window_queries = {dense_rows(data, 2, 2)};
    o.window_positions = window;
    o.future_queries = {dense_rows(data, 2, 2)};
    o.q_mean = {dense_rows(data, 1, 2)};
    o.q_cov = {dense_rows<const float>(covariance.data(), 2, 2)};
  }
  template <class S>
  std::string error_of(const S& scorer) const {
    float out[4];
    try {
      score_on(host_exec{}, scorer, o.observation(), Matrix<float>{out, 1, 4, 4});
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  }
};

struct ReadsValues : score::HeadScorer {
  static constexpr std::string_view name = "reads-values";
  static constexpr Needs needs = Needs::keys | Needs::values | Needs::positions;
  void score_head(const score::Head& head, std::span<float> out) const {
    for (std::size_t t = 0; t < head.tokens(); ++t) out[t] = head.value(t)[0] + static_cast<float>(head.position(t));
  }
};

}  // namespace

TEST_CASE("A6: a softmax scale that nobody set is refused by scorers that look at logits") {
  CHECK(LayerObservation<float>{}.softmax_scale == 0.f);
  CHECK(OwnedObservation<float>{}.softmax_scale == 0.f);
  const auto refused = [](const auto& scorer) {
    for (const float scale : {0.f, -1.f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
      Layer layer;
      CHECK(layer.error_of(scorer) == "");
      layer.o.softmax_scale = scale;
      CHECK(layer.error_of(scorer).find(": layer 7 has softmax_scale=") != std::string::npos);
    }
  };
  refused(score::SnapKV{.window = 2});
  refused(score::Expected{});
  refused(score::Oracle{});
  Layer layer;
  layer.o.softmax_scale = 0.f;
  CHECK(layer.error_of(score::KNorm{}) == "");  // looks at none
}

TEST_CASE("A6: positions that do not ascend are refused, naming the entry") {
  const score::SnapKV window{.window = 2};
  Layer equal;
  equal.window = {3, 3};
  CHECK(equal.error_of(window) == "snapkv: layer 7: window_positions[1] is 3 after 3; positions must ascend");
  Layer turned;
  turned.window = {3, 2};
  CHECK(turned.error_of(window) == "snapkv: layer 7: window_positions[1] is 2 after 3; positions must ascend");
  Layer keys;
  keys.positions = {0, 2, 1, 3};
  CHECK(keys.error_of(window) == "snapkv: layer 7, head 0: positions[2] is 1 after 2; positions must ascend");
  CHECK(keys.error_of(score::Expected{}) ==
        "expected: layer 7, head 0: positions[2] is 1 after 2; positions must ascend");
}

TEST_CASE("inputs of another size than the shape says are refused, naming both numbers") {
  Layer layer;
  CHECK(layer.error_of(ReadsValues{}) == "");
  layer.o.values = {dense_rows<const float>(layer.rows.data(), 3, 2)};
  CHECK(layer.error_of(ReadsValues{}) == "reads-values: layer 7, head 0 has values [3][2]; [4][2] is required");
  layer = {};
  layer.o.values.clear();
  CHECK(layer.error_of(ReadsValues{}) == "reads-values: layer 7 has values of 0 heads; the shape says 1");
  Layer few;
  few.o.positions = {std::span<const index_t>(few.positions).first(3)};
  CHECK(few.error_of(ReadsValues{}) == "reads-values: layer 7, head 0 has 3 positions of 4 tokens");
  Layer wide;
  wide.o.keys = {dense_rows<const float>(wide.rows.data(), 2, 4)};
  CHECK(wide.error_of(score::KNorm{}) == "knorm: layer 7, head 0 has keys [2][4]; [2][2] is required");
  Layer future;
  future.o.future_queries = {dense_rows<const float>(future.rows.data(), 1, 4)};
  CHECK(future.error_of(score::Oracle{}) == "oracle: layer 7 has continuation queries of 4 elements; the shape says 2");
}

TEST_CASE("a missing input is named") {
  Layer layer;
  layer.o.rope = {};
  CHECK(layer.error_of(score::Expected{}) == "expected: layer 7 has no RoPE description (rope); this scorer needs it");
  layer = {};
  layer.o.q_cov.clear();
  CHECK(layer.error_of(score::Expected{}) ==
        "expected: layer 7 has no query statistics (q_mean, q_cov); this scorer needs it");
}
