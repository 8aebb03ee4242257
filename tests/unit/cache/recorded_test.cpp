#include <doctest/doctest.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/cache/recorded.hpp"

using namespace kvevict;

static_assert(KVCacheView<RecordedCache<float>> && KVCacheView<RecordedCache<fp16_t>> &&
              KVCacheView<RecordedCache<bf16_t>>);
static_assert(!KVCache<RecordedCache<float>, host_exec>, "a recording is read only");

namespace {
// 1 layer, 2 KV heads, 2 query heads, keys of 2 and values of 1 element; a prompt of 3 rows, a continuation of 1;
// queries of the last 2 rows.
struct Memory {
  std::vector<float> k{0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17};
  std::vector<float> v{0, 1, 2, 3, 10, 11, 12, 13};
  std::vector<float> q{20, 21, 22, 23, 30, 31, 32, 33};
  std::vector<index_t> positions{5, 6, 8, 9}, q_positions{8, 9};
};
Recording<float> recording(const std::shared_ptr<Memory>& m) {
  return {{1, 2, 2, 2, 1}, 3, m->positions, m->q_positions, {{m->k.data(), m->v.data(), m->q.data()}}, m};
}
}  // namespace

TEST_CASE("a recording shows the prompt; the continuation is apart") {
  const RecordedCache<float> cache(recording(std::make_shared<Memory>()));
  CHECK(cache.tokens(0, 1) == 3);
  CHECK(cache.keys(0, 1).rows == 3);
  CHECK(cache.keys(0, 1).at(2, 1) == 15);
  CHECK(cache.values(0, 1).at(2, 0) == 12);
  CHECK(cache.positions(0, 0).size() == 3);
  CHECK(cache.positions(0, 0)[2] == 8);
  CHECK(cache.prompt_queries(0, 1).rows == 1);
  CHECK(cache.prompt_queries(0, 1).at(0, 0) == 30);
  CHECK(cache.prompt_query_positions()[0] == 8);
  CHECK(cache.continuation_len() == 1);
  CHECK(cache.continuation_keys(0, 0).at(0, 1) == 7);
  CHECK(cache.continuation_values(0, 1).at(0, 0) == 13);
  CHECK(cache.continuation_queries(0, 1).at(0, 1) == 33);
  CHECK(cache.continuation_positions()[0] == 9);
}

TEST_CASE("copies share the recording and keep it alive") {
  auto memory = std::make_shared<Memory>();
  const std::weak_ptr<Memory> watch = memory;
  auto first = std::make_unique<RecordedCache<float>>(recording(memory));
  memory.reset();
  {
    const RecordedCache<float> copy = *first;
    CHECK(copy.keys(0, 0).data == first->keys(0, 0).data);
    first.reset();
    CHECK_FALSE(watch.expired());
    CHECK(copy.keys(0, 0).at(1, 0) == 2);
  }
  CHECK(watch.expired());
}

TEST_CASE("a recording without queries has none") {
  auto r = recording(std::make_shared<Memory>());
  r.q_positions = {};
  r.layers[0].q = nullptr;
  const RecordedCache<float> cache(std::move(r));
  CHECK(cache.prompt_queries(0, 0).rows == 0);
  CHECK(cache.continuation_queries(0, 1).rows == 0);
  CHECK(cache.prompt_query_positions().empty());
}

TEST_CASE("parts that do not fit each other are refused") {
  const auto refused = [](auto change) {
    auto r = recording(std::make_shared<Memory>());
    change(r);
    CHECK_THROWS_AS(RecordedCache<float>(std::move(r)), std::invalid_argument);
  };
  refused([](auto& r) { r.shape.layers = 2; });
  refused([](auto& r) { r.shape.q_heads = 3; });
  refused([](auto& r) { r.prompt_len = 5; });
  refused([](auto& r) { r.prompt_len = 0; });
  refused([](auto& r) { r.prompt_len = 1; });  // 3 continuation rows, 2 queries
}
