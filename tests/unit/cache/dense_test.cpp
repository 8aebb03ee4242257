#include "kvevict/cache/dense.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/random_cache.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {
const CacheShape shape{.layers = 1, .kv_heads = 2, .q_heads = 2, .head_dim_k = 3, .head_dim_v = 4};
}

TEST_CASE("unequal lengths are an error that names both") {
  CHECK_THROWS_WITH_AS(
      (DenseCache<float>(RandomRows<float>(shape, {5, 6}, 1))),
      "DenseCache, copy: layer 0 would hold 5 rows in head 0 and 6 in head 1; all heads of a layer are "
      "equally long here (RaggedCache takes any length)",
      std::invalid_argument);
  auto cache = random_cache<DenseCache<float>>(shape, {6, 6}, 1);
  OwnedKeep keep;
  keep.add_head({0, 1});
  keep.add_head({3});
  CHECK_THROWS_WITH_AS(
      cache.compact(host_exec{}, 0, {keep.view(), {}}),
      "DenseCache, plan: layer 0 would hold 2 rows in head 0 and 1 in head 1; all heads of a layer are "
      "equally long here (RaggedCache takes any length)",
      std::invalid_argument);
  CHECK(cache.tokens(0) == 6);
}

TEST_CASE("truncating what some heads have evicted already is an error") {
  auto cache = random_cache<DenseCache<float>>(shape, {6, 6}, 1);
  OwnedKeep keep;
  keep.add_head({0, 5});
  keep.add_head({0, 1});
  cache.compact(host_exec{}, 0, {keep.view(), {}});
  CHECK_THROWS_AS(cache.trim(1), std::invalid_argument);  // head 0 would keep one row, head 1 two
  CHECK(cache.tokens(0) == 2);
  CHECK(cache.next_position() == 6);
  cache.truncate(1);  // both keep row 0
  CHECK(cache.tokens(0) == 1);
}

TEST_CASE("a layer is one tensor [head][token][dim], before and after compaction and appending") {
  auto cache = random_cache<DenseCache<float>>(shape, {6, 6}, 1);
  CHECK(cache.head_stride(0) == 6);
  OwnedKeep keep;
  keep.add_head({1, 4});
  keep.add_head({0, 5});
  const float newest = cache.keys(0, 1).at(5, 2);
  cache.compact(host_exec{}, 0, {keep.view(), {}});
  CHECK(cache.head_stride(0) == 2);
  CHECK(cache.keys(0, 1).data == cache.keys(0, 0).data + 2 * 3);
  CHECK(cache.keys(0, 0).data[(1 * 2 + 1) * 3 + 2] == newest);
  const NewRows<float> more(shape, 6, 1, 9);
  cache.append(host_exec{}, 0, more.keys(), more.values(), more.positions());
  CHECK(cache.tokens(0) == 3);
  CHECK(cache.values(0, 1).data == cache.values(0, 0).data + cache.head_stride(0) * 4);
}
