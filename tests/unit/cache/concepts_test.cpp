// What every cache promises, for each cache and element type.
#include "kvevict/cache/concepts.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/random_cache.hpp"
#include "kvevict/cache/dense.hpp"
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/metrics/reference.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

struct NoPositions {
  using element_type = float;
  using memory_space = host_space;
  CacheShape shape() const;
  index_t tokens(index_t, index_t) const;
  Rows<const float> keys(index_t, index_t) const;
  Rows<const float> values(index_t, index_t) const;
};
struct NotFreeing : RandomRows<float> {};  // a view alone: nothing in it can drop a row
static_assert(!KVCacheView<NoPositions>);
static_assert(KVCacheView<NotFreeing> && !KVCache<NotFreeing, host_exec>);

template <class C>
constexpr bool dense_cache = std::same_as<C, DenseCache<typename C::element_type>>;

const CacheShape shape{.layers = 2, .kv_heads = 3, .q_heads = 6, .head_dim_k = 5, .head_dim_v = 7};
constexpr std::size_t row_elements = 5 + 7;

// Heads of 12 to 40 rows, or of 40 where they must be equal.
template <class C>
C make(std::uint64_t seed = 1, index_t least = 12) {
  return random_cache<C>(shape, dense_cache<C> ? equal_lengths(shape, 40) : ragged_lengths(shape, least, 40, seed),
                         seed, true);
}

template <class A, class B>
bool same_row(const Rows<A>& a, std::int64_t i, const Rows<B>& b, std::int64_t j) {
  for (index_t c = 0; c < a.cols; ++c)
    if (std::memcmp(&a.at(i, c), &b.at(j, c), sizeof(A)) != 0) return false;
  return true;
}

// Bit-identical rows and positions.
template <class A, class B>
bool same_rows(const A& a, const B& b) {
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      const auto p = a.positions(l, h), q = b.positions(l, h);
      if (std::vector<index_t>(p.begin(), p.end()) != std::vector<index_t>(q.begin(), q.end())) return false;
      if (a.tokens(l, h) != b.tokens(l, h) || a.keys(l, h).rows != a.tokens(l, h) ||
          a.values(l, h).rows != a.tokens(l, h))
        return false;
      for (index_t r = 0; r < a.tokens(l, h); ++r)
        if (!same_row(a.keys(l, h), r, b.keys(l, h), r) || !same_row(a.values(l, h), r, b.values(l, h), r))
          return false;
    }
  return true;
}

// The whole message, or nothing where nothing was thrown.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return {};
}
bool says(const std::string& message, const std::string& part) { return message.find(part) != std::string::npos; }

struct Queries {
  std::vector<std::vector<float>> data;
  std::vector<Rows<const float>> rows;
  std::vector<index_t> positions;
  explicit Queries(index_t count, index_t position) : positions(static_cast<std::size_t>(count), position) {
    for (index_t q = 0; q < shape.q_heads; ++q) {
      data.push_back(random_elements<float>(static_cast<std::size_t>(count * shape.head_dim_k),
                                            77 + static_cast<std::uint64_t>(q)));
      rows.push_back(dense_rows<const float>(data.back().data(), count, shape.head_dim_k));
    }
  }
  AttentionQueries<float> view() const { return {rows, positions}; }
};

}  // namespace

#define ALL_CACHES                                                                                     \
  RaggedCache<float>, RaggedCache<fp16_t>, RaggedCache<bf16_t>, PagedCache<float>, PagedCache<fp16_t>, \
      PagedCache<bf16_t>, DenseCache<float>, DenseCache<fp16_t>, DenseCache<bf16_t>
// Where the element type makes no difference, each cache and each type once.
#define EACH_CACHE RaggedCache<float>, PagedCache<fp16_t>, DenseCache<bf16_t>

TEST_CASE_TEMPLATE("U45: rows and positions are copied bit for bit from any view", C, ALL_CACHES) {
  using T = typename C::element_type;
  const RandomRows<T> source(shape, equal_lengths(shape, 33), 5, true);
  const C cache(source);
  CHECK(same_rows(cache, source));
  CHECK(cache.bytes_live() == 2u * 3u * 33u * row_elements * sizeof(T));
  CHECK(cache.bytes_reserved() >= cache.bytes_live());

  // Blocks, and columns that lie apart.
  const PagedCache<T> paged(source, host_exec{}, 4);
  if constexpr (!std::same_as<C, PagedCache<T>>) CHECK(same_rows(C(paged), source));
  struct Transposed : RandomRows<T> {
    std::vector<T> t;
    Rows<const T> keys(index_t, index_t) const { return {t.data(), 33, 5, 1, 33}; }
  };
  Transposed odd{source, std::vector<T>(33 * 5)};
  for (index_t r = 0; r < 33; ++r)
    for (index_t c = 0; c < 5; ++c) odd.t[static_cast<std::size_t>(c * 33 + r)] = source.keys(1, 1).at(r, c);
  const C turned(odd);
  CHECK(same_row(turned.keys(1, 1), 32, source.keys(1, 1), 32));
  CHECK(same_row(turned.values(0, 2), 32, source.values(0, 2), 32));
}

TEST_CASE_TEMPLATE(
    "attention over the compacted cache equals attention over the full cache with the evicted rows masked", C,
    ALL_CACHES) {
  const Queries queries(6, 60);  // sees the rows up to position 60, not all
  for (const index_t least : {0, 1, 5, 11}) {
    const C full = make<C>(static_cast<std::uint64_t>(least) + 3);
    C small = full;
    for (index_t l = 0; l < shape.layers; ++l) {
      const OwnedKeep keep = random_keep(full, l, least, dense_cache<C>, static_cast<std::uint64_t>(l + least));
      const HeadRows rows = keep.view();
      small.compact(host_exec{2}, l, {rows, {}});
      AttentionOptions<typename C::element_type> masked;
      masked.keep = &rows;
      const auto expected = reference_attention(full, l, queries.view(), 0.4, masked);
      const auto got = reference_attention(small, l, queries.view(), 0.4);
      CHECK(expected.output == got.output);
      CHECK(expected.lse == got.lse);
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        REQUIRE(small.tokens(l, h) == static_cast<index_t>(rows.head(h).size()));
        for (index_t i = 0; i < small.tokens(l, h); ++i) {
          const index_t r = rows.head(h)[static_cast<std::size_t>(i)];
          CHECK(same_row(small.keys(l, h), i, full.keys(l, h), r));
          CHECK(same_row(small.values(l, h), i, full.values(l, h), r));
          CHECK(small.positions(l, h)[static_cast<std::size_t>(i)] ==
                full.positions(l, h)[static_cast<std::size_t>(r)]);
        }
      }
    }
    CHECK(small.next_position() == full.next_position());
    CHECK(small.bytes_live() < full.bytes_live());
  }
}

TEST_CASE_TEMPLATE("a plan that keeps everything changes nothing", C, EACH_CACHE) {
  const C before = make<C>();
  C cache = before;
  for (index_t l = 0; l < shape.layers; ++l) {
    const OwnedKeep all = random_keep(cache, l, 40, true, 1);
    cache.compact(host_exec{}, l, {all.view(), {}});
  }
  CHECK(same_rows(cache, before));
  CHECK(cache.bytes_reserved() == before.bytes_reserved());
}

TEST_CASE_TEMPLATE("a bad plan names layer and head, and changes nothing", C, EACH_CACHE) {
  const C before = make<C>();
  C cache = before;
  const index_t t = before.tokens(1, 1);
  const auto attempt = [&](std::vector<std::int64_t> offsets, std::vector<index_t> rows,
                           std::vector<RowMerge> merges = {}) {
    const std::string message = error_of([&] { cache.compact(host_exec{}, 1, {HeadRows{offsets, rows}, merges}); });
    CHECK(same_rows(cache, before));
    return message;
  };
  CHECK(says(attempt({0, 1, 2}, {0, 0}), "plan of layer 1: 3 offsets for 3 heads; 4 are needed"));
  CHECK(says(attempt({0, 1, 0, 1}, {0}), "plan of layer 1, head 1: offsets 1 to 0 do not ascend within 1 rows"));
  CHECK(says(attempt({0, 1, 2, 4}, {0, 0, 0}), "plan of layer 1, head 2: offsets 2 to 4 do not ascend within 3 rows"));
  CHECK(says(attempt({-1, 1, 2, 3}, {0, 0, 0}), "plan of layer 1, head 0: offsets -1 to 1"));
  CHECK(says(attempt({0, 2, 4, 6}, {0, 1, 1, 1, 0, 1}), "plan of layer 1, head 1: row 1 after row 1"));
  CHECK(says(attempt({0, 2, 4, 6}, {0, 1, 2, 1, 0, 1}), "plan of layer 1, head 1: row 1 after row 2"));
  CHECK(says(attempt({0, 1, 2, 3}, {0, t, 0}), joined_text("plan of layer 1, head 1: row ", t)));
  CHECK(says(attempt({0, 1, 2, 3}, {-1, 0, 0}), "plan of layer 1, head 0: row -1"));
  CHECK(says(attempt({0, 1, 2, 3}, {0, 0, 0}, {{3, 1, 0, 1.f}}), "a merge names head 3 of 3"));
  CHECK(says(attempt({0, 1, 2, 3}, {0, 0, 0}, {{2, 0, 0, 1.f}}), "head 2: merge from row 0"));
  CHECK(says(attempt({0, 1, 2, 3}, {0, 0, 0}, {{2, 1, 2, 1.f}}), "head 2: merge into row 2"));
  CHECK(says(attempt({0, 1, 2, 3}, {0, 0, 0}, {{2, 1, 0, -1.f}}), "has weight -1"));
  CHECK(says(error_of([&] { cache.compact(host_exec{}, 2, {}); }), "layer 2 does not exist; 0 to 1"));
}

TEST_CASE_TEMPLATE("merges make the kept value a weighted mean before rows are dropped", C, EACH_CACHE) {
  using T = typename C::element_type;
  const CacheShape one{.layers = 1, .kv_heads = 1, .q_heads = 1, .head_dim_k = 1, .head_dim_v = 2};
  C cache(one);
  std::vector<T> k, v;
  for (const float x : {10.f, 20.f, 30.f, 40.f}) k.push_back(from_float<T>(x));
  for (const float x : {1.f, 2.f, 3.f, 4.f, 5.f, 8.f, 7.f, 6.f}) v.push_back(from_float<T>(x));
  const Rows<const T> keys = dense_rows<const T>(k.data(), 4, 1), values = dense_rows<const T>(v.data(), 4, 2);
  cache.append(host_exec{}, 0, std::span(&keys, 1), std::span(&values, 1), std::vector<index_t>{0, 1, 2, 3});
  // Row 1 (3, 4) takes in row 0 (1, 2) with weight 1 and row 2 (5, 8) with weight 2: (3 + 1 + 10) / 4, (4 + 2 + 16)
  // / 4.
  const std::vector<RowMerge> merges{{0, 2, 1, 2.f}, {0, 0, 1, 1.f}};
  cache.compact(host_exec{}, 0, {HeadRows{std::vector<std::int64_t>{0, 2}, std::vector<index_t>{1, 3}}, merges});
  CHECK(to_float(cache.values(0, 0).at(0, 0)) == 3.5f);
  CHECK(to_float(cache.values(0, 0).at(0, 1)) == 5.5f);
  CHECK(to_float(cache.values(0, 0).at(1, 0)) == 7.f);
  CHECK(to_float(cache.keys(0, 0).at(0, 0)) == 20.f);
  CHECK(cache.positions(0, 0)[1] == 3);
}

TEST_CASE_TEMPLATE("U29: the next position is not the number of rows", C, EACH_CACHE) {
  using T = typename C::element_type;
  C cache = random_cache<C>(shape, equal_lengths(shape, 16), 2);
  CHECK(cache.next_position() == 16);
  for (index_t l = 0; l < shape.layers; ++l) {
    OwnedKeep keep;
    for (index_t h = 0; h < shape.kv_heads; ++h) keep.add_head({0, 1, 2, 3, 4, 5, 6, 7});  // the newest go
    cache.compact(host_exec{}, l, {keep.view(), {}});
  }
  CHECK(cache.next_position() == 16);
  const NewRows<T> more(shape, cache.next_position(), 1, 9);
  for (index_t l = 0; l < shape.layers; ++l) cache.append(host_exec{}, l, more.keys(), more.values(), more.positions());
  CHECK(cache.tokens(1, 2) == 9);
  CHECK(cache.positions(1, 2).back() == 16);
  CHECK(cache.next_position() == 17);
  CHECK(same_row(cache.keys(1, 2), 8, more.keys()[2], 0));
  CHECK(same_row(cache.values(0, 1), 8, more.values()[1], 0));
}

TEST_CASE_TEMPLATE("U38: trimming counts positions, not rows that are left", C, EACH_CACHE) {
  C cache = random_cache<C>(shape, equal_lengths(shape, 20), 2);
  for (index_t l = 0; l < shape.layers; ++l) {
    OwnedKeep keep;
    for (index_t h = 0; h < shape.kv_heads; ++h) keep.add_head({16, 17, 18, 19});
    cache.compact(host_exec{}, l, {keep.view(), {}});
  }
  cache.trim(3);
  CHECK(cache.tokens(0, 0) == 1);
  CHECK(cache.positions(0, 0)[0] == 16);
  CHECK(cache.next_position() == 17);
  CHECK(says(error_of([&] { cache.truncate(18); }), "position 18; the next position is 17"));
  CHECK(says(error_of([&] { cache.trim(18); }), "18 tokens; 0 to 17"));
}

TEST_CASE_TEMPLATE("U42: several probes start from the same compressed cache", C, EACH_CACHE) {
  using T = typename C::element_type;
  C cache = make<C>();
  for (index_t l = 0; l < shape.layers; ++l)
    cache.compact(host_exec{}, l, {random_keep(cache, l, 8, dense_cache<C>, 4).view(), {}});
  const C snapshot = cache;
  const index_t mark = cache.next_position();
  for (const std::uint64_t probe : {1u, 2u}) {
    for (int step = 0; step < 20; ++step) {
      const NewRows<T> more(shape, cache.next_position(), 2, probe);
      for (index_t l = 0; l < shape.layers; ++l)
        cache.append(host_exec{}, l, more.keys(), more.values(), more.positions());
    }
    CHECK(cache.next_position() == mark + 40);
    CHECK(!same_rows(cache, snapshot));
    cache.truncate(mark);
    CHECK(same_rows(cache, snapshot));
    CHECK(cache.next_position() == mark);
    CHECK(cache.bytes_live() == snapshot.bytes_live());
  }
}

TEST_CASE_TEMPLATE("appending checks heads, widths and positions before it writes", C, EACH_CACHE) {
  using T = typename C::element_type;
  C cache = random_cache<C>(shape, equal_lengths(shape, 4), 2);
  const C before = cache;
  const NewRows<T> more(shape, 4, 2, 9), stale(shape, 3, 2, 9);
  CHECK(says(error_of([&] { cache.append(host_exec{}, 0, stale.keys(), stale.values(), stale.positions()); }),
             "append to layer 0: position 3; positions ascend, the next is 4"));
  CHECK(says(error_of([&] {
               cache.append(host_exec{}, 0, more.keys(), more.values(), std::vector<index_t>{5, 5});
             }),
             "position 5; positions ascend, the next is 6"));
  CHECK(says(error_of([&] { cache.append(host_exec{}, 0, more.keys(), more.keys(), more.positions()); }),
             "rows of 5 and 5 elements; the cache holds 5 (keys) and 7 (values)"));
  CHECK(says(error_of([&] { cache.append(host_exec{}, 0, more.keys().first(2), more.values(), more.positions()); }),
             "2 heads of keys and 3 of values; the cache has 3"));
  CHECK(says(error_of([&] { cache.append(host_exec{}, 1, more.keys(), more.values(), std::vector<index_t>{4}); }),
             "layer 1, head 0: 2 key and 2 value rows for 1 positions"));
  CHECK(says(error_of([&] { cache.append(host_exec{}, 7, more.keys(), more.values(), more.positions()); }),
             "layer 7 does not exist; 0 to 1"));
  CHECK(same_rows(cache, before));
  CHECK(cache.next_position() == 4);
}

TEST_CASE_TEMPLATE("heads of no rows are legal, and grow again", C, EACH_CACHE) {
  using T = typename C::element_type;
  C cache = random_cache<C>(shape, equal_lengths(shape, 6), 2);
  OwnedKeep none;
  for (index_t h = 0; h < shape.kv_heads; ++h) none.add_head({});
  cache.compact(host_exec{}, 0, {none.view(), {}});
  CHECK(cache.tokens(0, 1) == 0);
  CHECK(cache.keys(0, 1).rows == 0);
  CHECK(cache.positions(0, 1).empty());
  CHECK(cache.tokens(1, 1) == 6);
  const Queries queries(2, 60);
  for (const double x : reference_attention(cache, 0, queries.view(), 1.0).output) CHECK(x == 0.0);
  const NewRows<T> more(shape, cache.next_position(), 3, 9);
  cache.append(host_exec{}, 0, more.keys(), more.values(), more.positions());
  CHECK(cache.tokens(0, 1) == 3);
  CHECK(same_row(cache.keys(0, 1), 2, more.keys()[1], 2));
}

TEST_CASE_TEMPLATE("copies are deep and moved caches keep their rows", C, EACH_CACHE) {
  C cache = make<C>();
  const C copy = cache;
  cache.mutable_values(1, 2).at(3, 4) = from_float<typename C::element_type>(99.f);
  CHECK(!same_rows(cache, copy));
  cache = copy;
  CHECK(same_rows(cache, copy));
  const C moved = std::move(cache);
  CHECK(same_rows(moved, copy));
}

TEST_CASE_TEMPLATE("renumbered positions decide what may follow", C, EACH_CACHE) {
  using T = typename C::element_type;
  C cache = random_cache<C>(shape, equal_lengths(shape, 8), 2);
  for (index_t l = 0; l < shape.layers; ++l) {
    OwnedKeep keep;
    for (index_t h = 0; h < shape.kv_heads; ++h) keep.add_head({0, 6, 7});
    cache.compact(host_exec{}, l, {keep.view(), {}});
    for (index_t h = 0; h < shape.kv_heads; ++h)
      for (index_t i = 0; i < 3; ++i) cache.mutable_positions(l, h)[static_cast<std::size_t>(i)] = i;
  }
  cache.renumbered(3);
  CHECK(cache.next_position() == 3);
  const NewRows<T> more(shape, 3, 1, 9);
  for (index_t l = 0; l < shape.layers; ++l) cache.append(host_exec{}, l, more.keys(), more.values(), more.positions());
  CHECK(cache.positions(0, 0).back() == 3);
}

TEST_CASE("U24: savings are stated in bytes") {
  const CacheShape model{.layers = 32, .kv_heads = 8, .q_heads = 32, .head_dim_k = 128, .head_dim_v = 128};
  const std::vector<std::int64_t> full(32 * 8, 1000), kept(32 * 8, 150);
  // 131,072 bytes a token: 32 layers * 8 heads * 256 elements * 2 bytes; query heads do not count.
  CHECK(RaggedCache<fp16_t>::bytes_for(model, full) == 131'072'000u);
  CHECK(RaggedCache<fp16_t>::bytes_for(model, kept) == 19'660'800u);
}

TEST_CASE("U25: what ragged budgets take depends on the kind of cache") {
  const CacheShape two{.layers = 1, .kv_heads = 2, .q_heads = 4, .head_dim_k = 64, .head_dim_v = 32};
  const std::vector<std::int64_t> rows{4, 28};
  constexpr std::size_t row = (64 + 32) * 2;
  CHECK(DenseCache<fp16_t>::bytes_for(two, rows) == 2 * 28 * row);
  CHECK(RaggedCache<fp16_t>::bytes_for(two, rows) == 32 * row);
  CHECK(PagedCache<fp16_t>::bytes_for(two, rows) == (16 + 32) * row);
  CHECK(PagedCache<fp16_t>::bytes_for(two, rows, 4) == 32 * row);
  // The longest head decides layer by layer.
  const CacheShape layers{.layers = 2, .kv_heads = 2, .q_heads = 2, .head_dim_k = 1, .head_dim_v = 1};
  CHECK(DenseCache<float>::bytes_for(layers, std::vector<std::int64_t>{1, 2, 10, 3}) == (2 * 2 + 2 * 10) * 8);
}
