#include "kvevict/cache/paged.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

#include "common/random_cache.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

const CacheShape shape{.layers = 1, .kv_heads = 2, .q_heads = 2, .head_dim_k = 3, .head_dim_v = 4};

// Every block has one owner at most, and all are in the pool.
template <class T>
bool tables_are_sound(const PagedCache<T>& cache) {
  std::multiset<index_t> used;
  for (index_t l = 0; l < cache.shape().layers; ++l)
    for (index_t h = 0; h < cache.shape().kv_heads; ++h)
      for (const index_t block : cache.block_table(l, h)) used.insert(block);
  const std::set<index_t> unique(used.begin(), used.end());
  return unique.size() == used.size() && used.size() + cache.free_blocks() == cache.pool_blocks() &&
         (used.empty() || (*used.begin() >= 0 && static_cast<std::size_t>(*used.rbegin()) < cache.pool_blocks()));
}

}  // namespace

TEST_CASE("U39: a block table per head, and emptied blocks return to the pool") {
  PagedCache<float> cache(RandomRows<float>(shape, {11, 7}, 1), host_exec{}, 4);
  CHECK(cache.block_table(0, 0).size() == 3);
  CHECK(cache.block_table(0, 1).size() == 2);
  CHECK(cache.free_blocks() == 0);
  const index_t last = cache.block_table(0, 0)[2];
  OwnedKeep keep;
  keep.add_head({0, 3, 4, 8, 10});
  keep.add_head({1, 6});
  cache.compact(host_exec{}, 0, {keep.view(), {}});
  CHECK(cache.block_table(0, 0).size() == 2);  // 5 rows
  CHECK(cache.block_table(0, 1).size() == 1);  // 2 rows
  CHECK(cache.pool_blocks() == 5);
  CHECK(cache.free_blocks() == 2);
  CHECK(cache.bytes_live() == 7 * 7 * sizeof(float));
  CHECK(cache.bytes_reserved() == 5 * 4 * 7 * sizeof(float));

  // What returned serves the next rows: 4 more in each head take one block each, and the pool need not grow.
  const NewRows<float> more(shape, 11, 4, 9);
  cache.append(host_exec{}, 0, more.keys(), more.values(), more.positions());
  CHECK(cache.pool_blocks() == 5);
  CHECK(cache.free_blocks() == 0);
  const auto table0 = cache.block_table(0, 0), table1 = cache.block_table(0, 1);
  CHECK(std::count(table0.begin(), table0.end(), last) + std::count(table1.begin(), table1.end(), last) == 1);
  CHECK(tables_are_sound(cache));
}

TEST_CASE("a pool of which more than half is free shrinks, and rows stay what they were") {
  const CacheShape layers{.layers = 3, .kv_heads = 2, .q_heads = 2, .head_dim_k = 3, .head_dim_v = 4};
  const PagedCache<fp16_t> full(RandomRows<fp16_t>(layers, ragged_lengths(layers, 40, 60, 2), 3), host_exec{}, 4);
  auto cache = full;
  std::vector<OwnedKeep> keeps;
  for (index_t l = 0; l < 3; ++l) {
    OwnedKeep keep;
    Random random(static_cast<std::uint64_t>(l));
    for (index_t h = 0; h < 2; ++h) keep.add_head(random_subset(full.tokens(l, h), 5, random));
    cache.compact(host_exec{2}, l, {keep.view(), {}});
    keeps.push_back(keep);
    CHECK(tables_are_sound(cache));
    CHECK(cache.free_blocks() <= cache.pool_blocks() / 2);
  }
  CHECK(cache.bytes_reserved() < full.bytes_reserved() / 2);
  cache.shrink_to_fit();
  CHECK(tables_are_sound(cache));
  CHECK(cache.pool_blocks() == 3 * 2 * 2);  // 5 rows in blocks of 4
  for (index_t l = 0; l < 3; ++l)
    for (index_t h = 0; h < 2; ++h)
      for (index_t i = 0; i < 5; ++i) {
        const index_t r = keeps[static_cast<std::size_t>(l)].view().head(h)[static_cast<std::size_t>(i)];
        for (index_t c = 0; c < 3; ++c) CHECK(cache.keys(l, h).at(i, c) == full.keys(l, h).at(r, c));
        for (index_t c = 0; c < 4; ++c) CHECK(cache.values(l, h).at(i, c) == full.values(l, h).at(r, c));
      }
}

TEST_CASE("the pool grows O(log rows) times, and truncating returns blocks") {
  PagedCache<float> cache(shape, 4);
  std::set<std::size_t> pools;
  for (index_t i = 0; i < 1000; ++i) {
    const NewRows<float> row(shape, i, 1, 3);
    cache.append(host_exec{}, 0, row.keys(), row.values(), row.positions());
    pools.insert(cache.pool_blocks());
  }
  CHECK(pools.size() <= 30);
  CHECK(tables_are_sound(cache));
  cache.truncate(9);
  CHECK(cache.block_table(0, 0).size() == 3);
  CHECK(tables_are_sound(cache));
  CHECK_THROWS_AS(PagedCache<float>(shape, 0), std::invalid_argument);
}
