#include "kvevict/model/evict_prefill.hpp"
#include "kvevict/cpu/expected_attention.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/window_attention.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/global.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/score/expected.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/snapkv.hpp"
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

bool same_rows_and_bits(const RaggedCache<float>& a, const RaggedCache<float>& b) {
  const CacheShape s = a.shape();
  for (index_t l = 0; l < s.layers; ++l)
    for (index_t h = 0; h < s.kv_heads; ++h) {
      const auto p = a.positions(l, h), q = b.positions(l, h);
      if (!std::equal(p.begin(), p.end(), q.begin(), q.end())) return false;
      for (index_t r = 0; r < a.tokens(l, h); ++r)
        for (index_t c = 0; c < s.head_dim_k; ++c)
          if (a.keys(l, h).at(r, c) != b.keys(l, h).at(r, c) || a.values(l, h).at(r, c) != b.values(l, h).at(r, c))
            return false;
    }
  return a.next_position() == b.next_position();
}

// Full prefill, one plan from all observations, then eviction.
template <class P>
RaggedCache<float> evict_at_the_end(const Decoder& d, std::span<const index_t> tokens, const P& policy,
                                    const Budget& budget, EvictionPlan& plan) {
  RaggedCache<float> cache(d.cache_shape());
  ForwardState state;
  const auto n = static_cast<index_t>(tokens.size());
  const std::vector<index_t> rows(static_cast<std::size_t>(d.cache_shape().heads_total()), n);
  auto planner = policy.make_planner(d.cache_shape(), rows, budget);
  CaptureOptions capture;
  capture.add(policy.scorer.needs, policy.scorer.window_rows());
  d.feed({}, tokens, cache, state, LayerCapture({}, d, cache, n, capture, [&](const LayerObservation<float>& o) {
           if (planner.layerwise()) (void)planner.layer(host_exec{}, o);
           else planner.observe(host_exec{}, o);
         }));
  plan = planner.finish({});
  apply(host_exec{}, plan, cache);
  return cache;
}

template <class P>
void layer_by_layer_is_the_same(const P& policy) {
  const Decoder d = tiny();
  const auto tokens = some_tokens(160);
  EvictionPlan plan;
  const auto expected = evict_at_the_end(d, tokens, policy, Budget::retain(0.3), plan);
  for (const index_t chunk : {512, 37}) {
    RaggedCache<float> cache(d.cache_shape());
    ForwardState state;
    const auto done = prefill_and_evict({2}, d, tokens, policy, Budget::retain(0.3), cache, state, chunk);
    CHECK(same_rows(done.plan, plan));
    CHECK(same_rows_and_bits(cache, expected));
    CHECK(done.rows_full == 960);
    CHECK(done.plan.rows_kept() <= 288);
    CHECK(state.tokens == 160);
  }
}

}  // namespace

TEST_CASE("layer by layer, in chunks or not, leaves the bits that eviction at the end leaves") {
  SUBCASE("position") { layer_by_layer_is_the_same(Policy{allocate::Uniform{}, score::Position{}}); }
  SUBCASE("window") { layer_by_layer_is_the_same(Policy{allocate::Uniform{}, score::SnapKV{}}); }
  SUBCASE("key norm under Ada") { layer_by_layer_is_the_same(Policy{allocate::Ada<>{}, score::KNorm{}}); }
  SUBCASE("query statistics") { layer_by_layer_is_the_same(Policy{allocate::Uniform{}, score::Expected{}}); }
  SUBCASE("a global allocator") { layer_by_layer_is_the_same(Policy{allocate::Global{}, score::KNorm{}}); }
}

TEST_CASE("the peak is what was kept and one full layer; a global allocator holds everything and says so") {
  const Decoder d = tiny();
  const auto tokens = some_tokens(100);
  RaggedCache<float> cache(d.cache_shape()), other(d.cache_shape());
  ForwardState state;
  // 3 layers of 2 heads, 20 of 100 rows each: before the last layer shrinks, 2 * 40 + 200 rows.
  const auto layered =
      prefill_and_evict({}, d, tokens, Policy{allocate::Uniform{}, score::Position{}}, Budget::rows(20), cache, state);
  CHECK(layered.rows_peak == 280);
  CHECK(cache.tokens(2, 1) == 20);
  CHECK(cache.next_position() == 100);
  const auto global =
      prefill_and_evict({}, d, tokens, Policy{allocate::Global{}, score::KNorm{}}, Budget::rows(20), other, state);
  CHECK(global.rows_peak == 600);
  REQUIRE_FALSE(global.plan.audit.entries().empty());
  CHECK(global.plan.audit.entries().back().find("every row was held") != std::string::npos);
  CHECK_THROWS_WITH(
      prefill_and_evict({}, d, tokens, Policy{allocate::Uniform{}, score::Position{}}, Budget::rows(20), cache, state),
      doctest::Contains("the cache is at position 100"));
}

TEST_CASE("retain 1 keeps every row, and decoding goes on as with the full cache") {
  const Decoder d = tiny();
  const auto tokens = some_tokens(70);
  RaggedCache<float> cache(d.cache_shape()), full(d.cache_shape());
  ForwardState state, plain;
  prefill_and_evict({}, d, tokens, Policy{allocate::Uniform{}, score::SnapKV{}}, Budget::retain(1), cache, state);
  d.feed({}, tokens, full, plain);
  CHECK(same_rows_and_bits(cache, full));
  const std::vector<index_t> next{7, 8}, rows{0, 1};
  d.feed({}, next, cache, state);
  d.feed({}, next, full, plain);
  std::vector<float> a(100), b(100);
  d.logits({}, state, rows, {a.data(), 2, 50, 50});
  d.logits({}, plain, rows, {b.data(), 2, 50, 50});
  CHECK(a == b);
}

TEST_CASE("prompts of one and of a few tokens work with every kind of input") {
  const Decoder d = tiny();
  for (const index_t n : {1, 2, 5}) {
    ForwardState state;
    RaggedCache<float> window(d.cache_shape()), statistics(d.cache_shape());
    prefill_and_evict({}, d, some_tokens(n), Policy{allocate::Uniform{}, score::SnapKV{}}, Budget::retain(0.5), window,
                      state);
    prefill_and_evict({}, d, some_tokens(n), Policy{allocate::Uniform{}, score::Expected{}}, Budget::retain(0.5),
                      statistics, state);
    CHECK(window.tokens(0, 0) == std::max(1, n / 2));
    CHECK(statistics.tokens(2, 1) == std::max(1, n / 2));
  }
}
