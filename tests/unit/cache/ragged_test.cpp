#include "kvevict/cache/ragged.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <set>
#include <vector>
#if defined(__linux__)
#include <unistd.h>
#endif

#include "common/random_cache.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

OwnedKeep first_rows(const std::vector<index_t>& counts) {
  OwnedKeep out;
  for (const index_t n : counts) {
    std::vector<index_t> rows;
    for (index_t r = 0; r < n; ++r) rows.push_back(r);
    out.add_head(rows);
  }
  return out;
}

#if defined(__linux__)
std::int64_t resident_bytes() {
  std::int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
}
#endif

}  // namespace

TEST_CASE("U19: head-wise budgets save bytes, and what is reserved says so") {
  const CacheShape shape{.layers = 1, .kv_heads = 2, .q_heads = 2, .head_dim_k = 8, .head_dim_v = 8};
  auto cache = random_cache<RaggedCache<float>>(shape, equal_lengths(shape, 32), 1);
  constexpr std::size_t row = 16 * sizeof(float);
  CHECK(cache.bytes_reserved() == 64 * row);
  cache.compact(host_exec{}, 0, {first_rows({4, 28}).view(), {}});
  cache.shrink_to_fit();
  CHECK(cache.bytes_live() == 32 * row);
  CHECK(cache.bytes_reserved() == 32 * row);
}

TEST_CASE("U22: appending row by row reallocates O(log rows) times") {
  const CacheShape shape{.layers = 1, .kv_heads = 16, .q_heads = 16, .head_dim_k = 4, .head_dim_v = 4};
  RaggedCache<float> cache(shape);
  std::set<std::size_t> sizes;
  for (index_t i = 0; i < 1000; ++i) {
    const NewRows<float> row(shape, i, 1, 3);
    cache.append(host_exec{}, 0, row.keys(), row.values(), row.positions());
    sizes.insert(cache.bytes_reserved());
  }
  CHECK(cache.tokens(0, 15) == 1000);
  CHECK(sizes.size() <= 24);  // a quarter more each time, by 16 rows at first
  CHECK(cache.bytes_reserved() <= cache.bytes_live() * 5 / 4 + 2 * 4096);
}

TEST_CASE("a loop that appends a row and drops one reallocates nothing") {
  const CacheShape shape{.layers = 1, .kv_heads = 2, .q_heads = 2, .head_dim_k = 4, .head_dim_v = 4};
  auto cache = random_cache<RaggedCache<float>>(shape, {100, 60}, 1);
  std::set<std::size_t> sizes;
  for (int step = 0; step < 200; ++step) {
    const NewRows<float> row(shape, cache.next_position(), 1, 3);
    cache.append(host_exec{}, 0, row.keys(), row.values(), row.positions());
    sizes.insert(cache.bytes_reserved());
    OwnedKeep keep;
    for (index_t h = 0; h < 2; ++h) {
      std::vector<index_t> rows{0};  // the second oldest goes
      for (index_t r = 2; r < cache.tokens(0, h); ++r) rows.push_back(r);
      keep.add_head(rows);
    }
    cache.compact(host_exec{}, 0, {keep.view(), {}});
    sizes.insert(cache.bytes_reserved());
  }
  CHECK(cache.tokens(0, 0) == 100);
  CHECK(cache.tokens(0, 1) == 60);
  CHECK(sizes.size() == 1);
  cache.shrink_to_fit();
  CHECK(cache.bytes_reserved() == cache.bytes_live());
}

TEST_CASE("room that was reserved is used before anything moves") {
  const CacheShape shape{.layers = 1, .kv_heads = 2, .q_heads = 2, .head_dim_k = 4, .head_dim_v = 4};
  auto cache = random_cache<RaggedCache<float>>(shape, {5, 9}, 1);
  cache.reserve(0, 7);
  CHECK(cache.bytes_reserved() == (5 + 9 + 2 * 7) * 8 * sizeof(float));
  const float* rows = cache.keys(0, 1).data;
  const NewRows<float> more(shape, cache.next_position(), 7, 3);
  cache.append(host_exec{}, 0, more.keys(), more.values(), more.positions());
  CHECK(cache.keys(0, 1).data == rows);
}

TEST_CASE("compaction with spare rows keeps them, and the rows, for heads of any lengths") {
  const CacheShape shape{.layers = 1, .kv_heads = 3, .q_heads = 3, .head_dim_k = 3, .head_dim_v = 2};
  for (const int threads : {1, 2, 7})
    for (const index_t least : {0, 20, 390}) {
      auto cache = random_cache<RaggedCache<bf16_t>>(shape, {400, 390, 395}, 1);
      const NewRows<bf16_t> more(shape, cache.next_position(), 2, 3);
      cache.append(host_exec{}, 0, more.keys(), more.values(), more.positions());
      const auto full = cache;
      const OwnedKeep keep = random_keep(cache, 0, least, false, 8);
      cache.compact(host_exec{threads}, 0, {keep.view(), {}});
      for (index_t h = 0; h < 3; ++h)
        for (index_t i = 0; i < cache.tokens(0, h); ++i) {
          const index_t r = keep.view().head(h)[static_cast<std::size_t>(i)];
          for (index_t c = 0; c < 3; ++c) CHECK(cache.keys(0, h).at(i, c) == full.keys(0, h).at(r, c));
          for (index_t c = 0; c < 2; ++c) CHECK(cache.values(0, h).at(i, c) == full.values(0, h).at(r, c));
        }
    }
}

#if defined(__linux__)
TEST_CASE("resident memory falls with the rows") {
  // 2 layers * 4 heads * 16384 rows * 256 floats = 128 MiB.
  const CacheShape shape{.layers = 2, .kv_heads = 4, .q_heads = 4, .head_dim_k = 128, .head_dim_v = 128};
  RaggedCache<float> cache(shape);
  {
    const NewRows<float> rows(shape, 0, 16384, 3);
    for (index_t l = 0; l < 2; ++l) cache.append(host_exec{}, l, rows.keys(), rows.values(), rows.positions());
  }
  const std::size_t full = cache.bytes_reserved();
  CHECK(full == std::size_t{128} << 20);
  const std::int64_t before = resident_bytes();
  for (index_t l = 0; l < 2; ++l) cache.compact(host_exec{}, l, {random_keep(cache, l, 2048, true, 5).view(), {}});
  const std::int64_t after = resident_bytes();
  CHECK(cache.bytes_live() == full / 8);
  CHECK(cache.bytes_reserved() == full / 8);
  // 112 MiB go; a little room for what else the process does.
  CHECK(before - after > std::int64_t{100} << 20);
}
#endif

TEST_CASE("threads change nothing") {
  // Above the size from which threads are used.
  const CacheShape shape{.layers = 1, .kv_heads = 4, .q_heads = 4, .head_dim_k = 64, .head_dim_v = 64};
  const RandomRows<float> source(shape, equal_lengths(shape, 2000), 6);
  std::vector<RaggedCache<float>> caches;
  for (const int threads : {1, 2, 7}) {
    caches.emplace_back(source, host_exec{threads});
    caches.back().compact(host_exec{threads}, 0, {random_keep(source, 0, 1800, false, 5).view(), {}});
  }
  for (index_t h = 0; h < 4; ++h) {
    const auto one = caches[0].keys(0, h), other = caches[0].values(0, h);
    for (std::size_t i = 1; i < caches.size(); ++i)
      for (std::int64_t r = 0; r < one.rows; ++r)
        for (index_t c = 0; c < 64; ++c) {
          const bool equal =
              one.at(r, c) == caches[i].keys(0, h).at(r, c) && other.at(r, c) == caches[i].values(0, h).at(r, c);
          if (!equal) FAIL_CHECK("row " << r << " of head " << h << " differs");
        }
  }
}
