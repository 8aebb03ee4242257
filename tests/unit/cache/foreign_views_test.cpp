#include <doctest/doctest.h>

#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/foreign_view.hpp"
#include "common/random_cache.hpp"
#include "kvevict/cache/dense.hpp"
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/plan/plan.hpp"

using namespace kvevict;
using testing::Foreign;

namespace {

constexpr index_t max_index = std::numeric_limits<index_t>::max();

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "no error";
}
bool says(const std::string& text, const std::string& part) {
  INFO(text);
  const bool found = text.find(part) != std::string::npos;
  CHECK(found);
  return found;
}

}  // namespace

TEST_CASE_TEMPLATE("a cache made from a view whose numbers disagree is an error that names both", C, RaggedCache<float>,
                   DenseCache<float>, PagedCache<float>) {
  const auto refused = [](const Foreign& view, const char* why) {
    says(error_of([&] { const C cache(view); }), std::string("layer 1, head 1: ") + why);
  };
  refused({.positions_shown = 8}, "8 positions for 3 tokens");
  refused({.positions_shown = 1}, "1 positions for 3 tokens");
  refused({.key_rows = 16}, "16 key rows for 3 tokens");
  refused({.value_rows = 2}, "2 value rows for 3 tokens");
  refused({.key_cols = 4}, "key rows of 4 elements");
  refused({.value_cols = 8}, "value rows of 8 elements");
  refused({.null_values = true}, "null value rows");
  Foreign late;
  late.position_list[2] = max_index;
  says(error_of([&] { const C cache(late); }), "newest position 2147483647; 0 to 2147483646");
  if constexpr (!std::is_same_v<C, DenseCache<float>>) refused({.stated = -3}, "-3 tokens");
}

TEST_CASE_TEMPLATE("layers and heads that do not exist are errors", C, RaggedCache<float>, DenseCache<float>,
                   PagedCache<float>) {
  C cache(Foreign{});
  for (const auto& [layer, head] : {std::array<index_t, 2>{2, 0}, {-1, 0}, {0, 2}, {0, -1}, {7, 7}}) {
    CHECK_THROWS_AS((void)cache.tokens(layer, head), std::invalid_argument);
    CHECK_THROWS_AS((void)cache.keys(layer, head), std::invalid_argument);
    CHECK_THROWS_AS((void)cache.values(layer, head), std::invalid_argument);
    CHECK_THROWS_AS((void)cache.positions(layer, head), std::invalid_argument);
    CHECK_THROWS_AS((void)cache.mutable_keys(layer, head), std::invalid_argument);
    CHECK_THROWS_AS((void)cache.mutable_values(layer, head), std::invalid_argument);
    CHECK_THROWS_AS((void)cache.mutable_positions(layer, head), std::invalid_argument);
  }
  says(error_of([&] { (void)cache.mutable_keys(7, 0); }), "layer 7 does not exist; 0 to 1");
  says(error_of([&] { (void)cache.mutable_keys(1, 2); }), "layer 1 has no head 2; 0 to 1");
}

TEST_CASE_TEMPLATE("reserving: a layer that exists, and rows that can be held", C, RaggedCache<float>,
                   DenseCache<float>) {
  C cache(Foreign{});
  says(error_of([&] { cache.reserve(7, 4); }), "layer 7 does not exist");
  says(error_of([&] { cache.reserve(0, -5); }), "-5 more rows");
  says(error_of([&] { cache.reserve(0, max_index); }), "2147483647 more rows; 0 to 2147483644");
  C huge(CacheShape{1, 2, 2, max_index, max_index});
  says(error_of([&] { huge.reserve(0, max_index); }), "more than can be addressed");
  cache.reserve(0, 100);
  CHECK(cache.tokens(0, 0) == 3);
}

TEST_CASE_TEMPLATE("a cache does not append its own rows", C, RaggedCache<float>, DenseCache<float>,
                   PagedCache<float>) {
  C cache(Foreign{});
  const std::vector<Rows<const float>> keys{cache.keys(0, 0), cache.keys(0, 1)},
      values{cache.values(0, 0), cache.values(0, 1)};
  const std::vector<index_t> positions{3, 4, 5};
  says(error_of([&] { cache.append(host_exec{}, 0, keys, values, positions); }),
       "layer 0, head 0: the new rows lie in this cache");
  CHECK(cache.tokens(0, 0) == 3);
}

TEST_CASE_TEMPLATE("trimming and renumbering stay within what the cache holds", C, RaggedCache<float>,
                   DenseCache<float>, PagedCache<float>) {
  C cache(Foreign{});
  for (const index_t tokens : {-1, 4, max_index, std::numeric_limits<index_t>::min()})
    CHECK_THROWS_AS(cache.trim(tokens), std::invalid_argument);
  says(error_of([&] { cache.renumbered(-5); }), "next position -5");
  says(error_of([&] { cache.renumbered(2); }), "next position 2, but layer 0, head 0 holds a row at 2");
  cache.renumbered(3);
  cache.trim(1);
  CHECK(cache.tokens(1, 1) == 2);
}

TEST_CASE("generic code makes every cache from a view in the same way") {
  const auto make = [](auto* kind) {
    using C = std::remove_pointer_t<decltype(kind)>;
    const C cache(Foreign{}, host_exec{2});
    CHECK(cache.tokens(1, 1) == 3);
  };
  make(static_cast<RaggedCache<float>*>(nullptr));
  make(static_cast<DenseCache<float>*>(nullptr));
  make(static_cast<PagedCache<float>*>(nullptr));
}

TEST_CASE("bytes of a part of a layer are no answer") {
  const CacheShape shape{2, 2, 2, 1, 1};
  CHECK_THROWS_AS((void)DenseCache<float>::bytes_for(shape, std::vector<std::int64_t>{1, 2, 3}), std::invalid_argument);
  CHECK(DenseCache<float>::bytes_for(shape, std::vector<std::int64_t>{1, 2}) == 32);
}

TEST_CASE("a plan has the layers and heads that it has") {
  const EvictionPlan empty;
  CHECK_THROWS_AS((void)empty.layer(0), std::invalid_argument);
  CHECK_THROWS_AS((void)empty.head(0, 0), std::invalid_argument);
  EvictionPlan plan;
  plan.layers = 1;
  plan.heads = 2;
  plan.offsets = {0, 1, 2};
  plan.indices = {0, 0};
  says(error_of([&] { (void)plan.head(0, 2); }), "no layer 0, head 2; it is for 1 layers of 2 heads");
  CHECK_THROWS_AS((void)plan.layer(-1), std::invalid_argument);
  CHECK(plan.layer(0).keep.head(1).size() == 1);
}
