#include "kvevict/observe/observations.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/foreign_view.hpp"
#include "common/random_cache.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/policy/snapkv.hpp"

using namespace kvevict;
using testing::Foreign;
using testing::random_cache;

static_assert(KVCacheView<Foreign> && !OwningCache<Foreign> && OwningCache<RaggedCache<float>>);

TEST_CASE("all layers of a cache in one call, as policies take them") {
  const CacheShape shape{3, 2, 4, 8, 4};
  const auto cache = random_cache<RaggedCache<float>>(shape, testing::ragged_lengths(shape, 40, 60, 1), 2);
  const std::vector<float> queries(32 * 8, 0.5f);
  std::vector<index_t> positions;
  for (index_t i = 0; i < 32; ++i) positions.push_back(i);
  const auto complete = [&](OwnedObservation<float>& layer) {
    for (index_t q = 0; q < shape.q_heads; ++q) layer.window_queries.push_back(dense_rows(queries.data(), 32, 8));
    layer.window_positions = positions;
  };
  const Observations<float> observations = observe_all(cache, 0.25f, complete);

  REQUIRE(observations.size() == 3);
  for (index_t l = 0; l < 3; ++l) {
    const LayerObservation<float>& o = observations[static_cast<std::size_t>(l)];
    CHECK(o.layer == l);
    CHECK(o.shape == shape);
    CHECK(o.softmax_scale == 0.25f);
    CHECK(o.window_queries.size() == 4);
    CHECK(o.window_positions.size() == 32);
    for (index_t h = 0; h < 2; ++h) {
      const auto i = static_cast<std::size_t>(h);
      CHECK(o.keys[i].data == cache.keys(l, h).data);
      CHECK(o.values[i].data == cache.values(l, h).data);
      CHECK(o.positions[i].data() == cache.positions(l, h).data());
    }
  }
  const auto plan = SnapKV{}.plan(host_exec{}, cache, observations, Budget::retain(0.5));
  CHECK(plan.layers == 3);
}

TEST_CASE("observations stay valid when they move, and a copy stands on its own") {
  const CacheShape shape{2, 2, 2, 2, 2};
  const auto cache = random_cache<RaggedCache<float>>(shape, testing::equal_lengths(shape, 5), 3);
  auto first = std::make_unique<Observations<float>>(observe_all(cache, 1.f));
  const Observations<float> copy(*first);
  Observations<float> moved(std::move(*first));
  Observations<float> assigned;
  assigned = moved;
  first.reset();
  moved = observe_all(cache, 2.f);
  for (const Observations<float>* o : {&copy, const_cast<const Observations<float>*>(&assigned)})
    for (const auto& layer : o->layers()) {
      CHECK(layer.softmax_scale == 1.f);
      CHECK(layer.keys[1].data == cache.keys(layer.layer, 1).data);
      CHECK(layer.tokens(1) == 5);
    }
  CHECK(moved[1].softmax_scale == 2.f);
}

TEST_CASE("a view whose numbers disagree is refused with layer, head and both numbers") {
  const auto refused = [](Foreign view, const char* why) {
    CHECK_THROWS_WITH_AS((void)observe_all(view, 1.f), doctest::Contains(why), std::invalid_argument);
    CHECK_NOTHROW((void)observe_layer(view, 0, 1.f));  // the other layer is right
  };
  refused({.stated = -1}, "layer 1, head 1: -1 tokens; 0 or more");
  refused({.stated = 2}, "layer 1, head 1: 3 key rows for 2 tokens");
  refused({.key_rows = 4}, "layer 1, head 1: 4 key rows for 3 tokens");
  refused({.value_rows = 2}, "layer 1, head 1: 2 value rows for 3 tokens");
  refused({.positions_shown = 8}, "layer 1, head 1: 8 positions for 3 tokens");
  refused({.key_cols = 4}, "layer 1, head 1: key rows of 4 elements; the shape says 2 (head_dim_k)");
  refused({.value_cols = 2}, "layer 1, head 1: value rows of 2 elements; the shape says 4 (head_dim_v)");
  refused({.null_values = true}, "layer 1, head 1: null value rows for 3 tokens");
  Foreign late;
  late.position_list[2] = std::numeric_limits<index_t>::max();
  CHECK_THROWS_WITH_AS((void)observe_all(late, 1.f), doctest::Contains("newest position 2147483647"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)observe_layer(Foreign{}, 2, 1.f), doctest::Contains("layer 2 does not exist; 0 to 1"),
                       std::invalid_argument);
  CHECK_THROWS_AS((void)observe_layer(Foreign{}, -1, 1.f), std::invalid_argument);
}
