// The recorder against the embedded dump, which transformers made from the same weights.
#include "kvevict/model/recorder.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/temp_dir.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/model/decoder.hpp"

using namespace kvevict;

namespace {

// Largest difference, in units of one f16 rounding of the larger value (2^-11) plus an absolute floor.
double roundings(const Rows<const fp16_t>& a, const Rows<const fp16_t>& b, index_t rows) {
  double worst = 0;
  for (index_t r = 0; r < rows; ++r)
    for (index_t c = 0; c < a.cols; ++c) {
      const double x = static_cast<double>(to_float(a.at(r, c))), y = static_cast<double>(to_float(b.at(r, c)));
      worst = std::max(worst, std::abs(x - y) / (std::max(std::abs(x), std::abs(y)) * 0x1p-11 + 1e-4));
    }
  return worst;
}

double relative_difference(const TensorView& a, const TensorView& b) {
  const auto x = converted<float>(a), y = converted<float>(b);
  double worst = 0, scale = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, static_cast<double>(std::abs(x[i] - y[i])));
    scale = std::max(scale, static_cast<double>(std::abs(y[i])));
  }
  return worst / scale;
}

}  // namespace

TEST_CASE("the embedded dump recorded again agrees with the one that is there") {
  const Dump<fp16_t> embedded(KVEVICT_SOURCE_DIR "/examples/data/smollm2-512.safetensors");
  const Decoder d(KVEVICT_MODEL_DIR);
  const testing::TempDir dir;
  RecordOptions options;
  options.prompt_len = embedded.info().prompt_len;
  options.attention_sums = options.query_statistics = true;
  record({2}, d, embedded.info().token_ids, options, dir / "dump.safetensors");
  const Dump<fp16_t> ours(dir / "dump.safetensors");

  CHECK(ours.info().shape == embedded.info().shape);
  CHECK(ours.info().q_positions == embedded.info().q_positions);
  CHECK(ours.info().rope_theta == embedded.info().rope_theta);
  CHECK(ours.info().softmax_scale == embedded.info().softmax_scale);
  CHECK(ours.info().q_stats_first == embedded.info().q_stats_first);
  for (index_t l = 0; l < 30; l += 5) {
    CAPTURE(l);
    for (index_t h = 0; h < 3; ++h) {
      CHECK(roundings(ours.cache().keys(l, h), embedded.cache().keys(l, h), 64) < 2);
      CHECK(roundings(ours.cache().values(l, h), embedded.cache().values(l, h), 64) < 2);
    }
    for (index_t q = 0; q < 9; ++q) {
      CHECK(roundings(ours.cache().prompt_queries(l, q), embedded.cache().prompt_queries(l, q), 64) < 2);
      CHECK(roundings(ours.cache().continuation_queries(l, q), embedded.cache().continuation_queries(l, q), 64) < 2);
    }
    CHECK(relative_difference(*ours.extra(l, "attn_sum"), *embedded.extra(l, "attn_sum")) < 1e-4);
    CHECK(relative_difference(*ours.extra(l, "q_mean"), *embedded.extra(l, "q_mean")) < 1e-4);
    CHECK(relative_difference(*ours.extra(l, "q_cov"), *embedded.extra(l, "q_cov")) < 1e-3);
  }
}
