// Top-k: the rule (score descending, then index ascending; output ascending), on hand-made rows and on a thousand
// hard ones against a sort, with the vector and the portable passes.
#include "kvevict/cpu/topk.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/topk_rows.hpp"

namespace kvevict {
namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
using Indices = std::vector<index_t>;

template <class T>
Indices select(const std::vector<T>& scores, index_t k) {
  std::vector<std::byte> scratch(topk_scratch_bytes(static_cast<std::int64_t>(scores.size())));
  Indices out(static_cast<std::size_t>(k));
  topk(std::span<const T>(scores), k, out, scratch);
  return out;
}

// Like select(), with chosen passes, scratch off any boundary, and a guard behind the output.
template <class Passes, class T>
Indices select_guarded(const std::vector<T>& scores, index_t k) {
  const auto n = static_cast<std::int64_t>(scores.size());
  std::vector<std::byte> scratch(topk_scratch_bytes(n) + 3);
  Indices out(static_cast<std::size_t>(k) + 80, -7);
  detail::topk_from<Passes>(scores.data(), n, k, 0, out.data(), std::span(scratch).subspan(3));
  const bool guarded = std::all_of(out.begin() + k, out.end(), [](index_t i) { return i == -7; });
  CHECK_MESSAGE(guarded, "written behind the output, n = ", n, ", k = ", k);
  out.resize(static_cast<std::size_t>(k));
  return out;
}

// All indices by the rule.
template <class T>
Indices ranking(const std::vector<T>& scores) {
  Indices order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) {
    return to_float(scores[static_cast<std::size_t>(a)]) > to_float(scores[static_cast<std::size_t>(b)]);
  });
  return order;
}

Indices first_of(const Indices& order, index_t k) {
  Indices out(order.begin(), order.begin() + k);
  std::sort(out.begin(), out.end());
  return out;
}

template <class T>
std::vector<T> converted(const std::vector<float>& scores) {
  std::vector<T> out(scores.size());
  std::transform(scores.begin(), scores.end(), out.begin(), from_float<T>);
  return out;
}

// Rows that are hard for a method which samples: the kind decides what they hold.
constexpr int hard_kinds = 17;
std::vector<float> hard_row(int kind, std::size_t n) {
  std::mt19937 random(static_cast<std::uint32_t>(n) + 977u * static_cast<std::uint32_t>(kind));
  const auto uniform = [&] { return static_cast<float>(random() >> 8) * 0x1p-24f; };
  const auto level = [&](std::uint32_t levels) { return static_cast<float>(random() % levels); };
  std::vector<float> row(n);
  for (std::size_t i = 0; i < n; ++i) {
    const float u = uniform();
    const float x = static_cast<float>(i);
    switch (kind) {
      case 0:
        row[i] = 0.25f;
        break;  // one value
      case 1:
        row[i] = level(2);
        break;  // two values
      case 2:
        row[i] = level(5) - 2;
        break;  // five around zero
      case 3:
        row[i] = x;
        break;  // ascending
      case 4:
        row[i] = -x;
        break;  // descending
      case 5:
        row[i] = (i % 2 == 0 ? 1.f : -1.f) * std::exp(8 * u);
        break;  // both signs
      case 6:
        row[i] = i % 3 == 0 ? -0.f : 0.f;
        break;  // zeros of both signs
      case 7:
        row[i] = u * std::numeric_limits<float>::min();
        break;  // denormals
      case 8:
        row[i] = u < 0.3f ? -inf : u > 0.8f ? inf : u;
        break;  // infinities among numbers
      case 9:
        row[i] = -inf;
        break;  // nothing but -inf
      case 10:
        row[i] = -1 - 100 * u;
        break;  // all negative
      case 11:
        row[i] = std::exp(6 * u);
        break;  // positive
      case 12:
        row[i] = static_cast<float>(i / 7 % 13);
        break;  // runs of equal values
      case 13:
        row[i] = u < 0.999f ? 0.f : u;
        break;  // zero but for a few
      case 14:
        row[i] = (u < 0.5f ? 1 : -1) * std::numeric_limits<float>::max();
        break;
      case 15:
        row[i] = 1 + 0x1p-23f * level(4);
        break;  // neighbours in the last place
      default:
        row[i] = u;
        break;
    }
  }
  if (kind == 16 && n > 0) {  // whatever the sample looks at is large, the rest is small
    std::vector<std::int32_t> sample(detail::Passes::long_sample);
    for (const std::int64_t samples : {detail::Passes::short_sample, detail::Passes::long_sample})
      if (static_cast<std::int64_t>(n) >= samples)
        detail::take_sample(
            [&](std::int64_t i) {
              row[static_cast<std::size_t>(i)] += 100;
              return 0;
            },
            static_cast<std::int64_t>(n), samples, sample.data());
  }
  return row;
}

template <class T>
void check_hard_rows(std::span<const std::size_t> sizes, int& cases) {
  for (const std::size_t n : sizes)
    for (int kind = 0; kind < hard_kinds; ++kind) {
      const std::vector<T> scores = converted<T>(hard_row(kind, n));
      const Indices order = ranking(scores);
      const auto most = static_cast<index_t>(n);
      Indices tried;
      for (const index_t k : {0, 1, most / 7, most / 2, most - 1, most}) {
        if (k < 0 || k > most || std::find(tried.begin(), tried.end(), k) != tried.end()) continue;
        tried.push_back(k);
        const Indices expected = first_of(order, k);
        const bool same = select_guarded<detail::Passes>(scores, k) == expected;
        const bool portable = select_guarded<detail::PortablePasses>(scores, k) == expected;
        CHECK_MESSAGE(same, detail::Passes::name, " passes: n = ", n, ", k = ", k, ", kind ", kind);
        CHECK_MESSAGE(portable, "portable passes: n = ", n, ", k = ", k, ", kind ", kind);
        ++cases;
      }
    }
}

}  // namespace

TEST_CASE("ordered keys order scores, zeros of both signs alike") {
  const std::vector<float> ascending{-inf, -3e38f, -1, -1e-45f, 0, 1e-45f, 1e-38f, 1, 3e38f, inf};
  for (std::size_t i = 1; i < ascending.size(); ++i)
    CHECK(detail::ordered_key(ascending[i - 1]) < detail::ordered_key(ascending[i]));
  CHECK(detail::ordered_key(-0.f) == detail::ordered_key(0.f));
  CHECK(detail::ordered_key(from_float<bf16_t>(-0.f)) == 0);
  CHECK(detail::ordered_key(from_float<fp16_t>(-2.f)) == -0x4000);
  CHECK(detail::is_nan_key<float>(detail::ordered_key(nan)));
  CHECK(detail::is_nan_key<float>(detail::ordered_key(-nan)));
  CHECK_FALSE(detail::is_nan_key<float>(detail::ordered_key(-inf)));
  CHECK(detail::is_nan_key<bf16_t>(detail::ordered_key(from_float<bf16_t>(nan))));
  CHECK_FALSE(detail::is_nan_key<fp16_t>(detail::ordered_key(from_float<fp16_t>(inf))));
}

TEST_CASE("the best k come out ascending, whatever their order by score") {
  const std::vector<float> scores{0.1f, 0.9f, 0.4f, 0.8f, 0.2f};
  CHECK(select(scores, 0) == Indices{});
  CHECK(select(scores, 1) == Indices{1});
  CHECK(select(scores, 2) == Indices{1, 3});
  CHECK(select(scores, 3) == Indices{1, 2, 3});
  CHECK(select(scores, 5) == Indices{0, 1, 2, 3, 4});
  CHECK(select(std::vector<float>{}, 0) == Indices{});
}

TEST_CASE("equal scores go to the lower index, in part of them too") {
  CHECK(select(std::vector<float>{5, 7, 5, 7, 5}, 1) == Indices{1});
  CHECK(select(std::vector<float>{5, 7, 5, 7, 5}, 3) == Indices{0, 1, 3});
  CHECK(select(std::vector<float>{5, 7, 5, 7, 5}, 4) == Indices{0, 1, 2, 3});
  CHECK(select(std::vector<float>{0.f, -0.f, 0.f}, 2) == Indices{0, 1});
  CHECK(select(std::vector<float>{-0.f, 0.f, -0.f}, 1) == Indices{0});
  CHECK(select(std::vector<float>{-1, -0.f, 0.f, -1}, 2) == Indices{1, 2});
}

TEST_CASE("infinities are ordinary scores") {
  CHECK(select(std::vector<float>{-inf, 1, inf, -inf, inf}, 2) == Indices{2, 4});
  CHECK(select(std::vector<float>{-inf, 1, inf, -inf, inf}, 4) == Indices{0, 1, 2, 4});
  CHECK(select(std::vector<float>(40, -inf), 3) == Indices{0, 1, 2});
}

TEST_CASE("U44: 100 equal scores, k 5: the first five") {
  CHECK(select(std::vector<float>(100, 0.5f), 5) == Indices{0, 1, 2, 3, 4});
}

TEST_CASE("U44: 300 values inside one fp16 step are told apart") {
  std::vector<float> scores(300);  // 1 + j * 2^-20, all of which round to 1 in fp16; in a scrambled order
  for (std::size_t i = 0; i < 300; ++i) scores[i] = 1 + static_cast<float>(i * 77 % 300) * 0x1p-20f;
  CHECK(from_float<fp16_t>(scores[0]) == from_float<fp16_t>(1 + 299 * 0x1p-20f));
  Indices expected;
  for (index_t i = 0; i < 300; ++i)
    if (i * 77 % 300 >= 290) expected.push_back(i);
  CHECK(select(scores, 10) == expected);
}

TEST_CASE("16-bit scores follow the same rule, with the many ties that they have") {
  const std::vector<float> scores{1, -2, 1.001f, 3, -2, 3};  // 1.001 is 1 in bfloat16, not in fp16
  CHECK(select(converted<bf16_t>(scores), 3) == Indices{0, 3, 5});
  CHECK(select(converted<fp16_t>(scores), 3) == Indices{2, 3, 5});
  CHECK(select(converted<bf16_t>(scores), 5) == Indices{0, 1, 2, 3, 5});
}

TEST_CASE("a NaN is an error that names row and token, wherever it stands and whatever its sign") {
  for (const std::size_t n : {1u, 5u, 130u, 5000u})
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1})
      for (const float bad : {nan, -nan})
        for (const index_t k : {0, 1, static_cast<index_t>(n)}) {
          std::vector<float> scores(n, 1.f);
          scores[at] = bad;
          bool thrown = false;
          try {
            (void)select(scores, k);
          } catch (const NanScore& error) {
            thrown = true;
            CHECK(error.token == static_cast<index_t>(at));
            CHECK(error.row == 0);
            CHECK(std::string(error.what()).find("token " + std::to_string(at)) != std::string::npos);
          }
          CHECK(thrown);
        }
  std::vector<bf16_t> half(300);
  half[299] = from_float<bf16_t>(nan);
  CHECK_THROWS_AS((void)select(half, 30), NanScore);
}

TEST_CASE("wrong sizes are refused with both numbers") {
  const std::vector<float> scores(10, 1.f);
  std::vector<std::byte> scratch(topk_scratch_bytes(10));
  Indices out(3);
  CHECK_THROWS_WITH_AS(topk(scores, 11, out, scratch), "topk: k = 11 of 10 scores; 0 to 10 is legal",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(topk(scores, -1, out, scratch), "topk: k = -1 of 10 scores; 0 to 10 is legal",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(topk(scores, 4, out, scratch), "topk: out holds 3 indices; k = 4 are written",
                       std::invalid_argument);
  CHECK_THROWS_AS(topk(scores, 3, out, std::span(scratch).first(100)), std::invalid_argument);
}

TEST_CASE("a thousand hard rows agree with a sort: float, fp16 and bf16, vector and portable passes") {
  int cases = 0;
  const std::vector<std::size_t> sizes{0, 1, 2, 15, 16, 17, 64, 127, 128, 129, 255, 257, 1000, 4097, 70001};
  const std::vector<std::size_t> short_sizes{0, 1, 2, 15, 16, 17, 64, 129, 1000, 4097};
  check_hard_rows<float>(sizes, cases);
  CHECK(cases >= 1000);
  check_hard_rows<fp16_t>(short_sizes, cases);
  check_hard_rows<bf16_t>(short_sizes, cases);
}

TEST_CASE("radix buckets, the way out of bad samples, find the k-th key and its neighbours") {
  std::vector<std::uint32_t> bins(detail::radix_bins);
  for (const std::int32_t spread : {1, 3, 5000, 2000000000}) {
    std::mt19937 random(static_cast<std::uint32_t>(spread));
    std::vector<std::int32_t> keys(3000);
    for (std::int32_t& key : keys)
      key = static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(spread)) - spread / 2;
    std::vector<std::int32_t> sorted = keys;
    std::sort(sorted.begin(), sorted.end(), std::greater<>{});
    for (const std::int64_t k : {1, 2, 1500, 2999, 3000}) {
      std::vector<std::int32_t> work = keys;
      const detail::KthKey kth =
          detail::kth_by_radix<detail::Passes>(work.data(), 3000, k, {-spread / 2, spread - spread / 2}, bins.data());
      const std::int32_t expected = sorted[static_cast<std::size_t>(k - 1)];
      CHECK(kth.key == expected);
      CHECK(kth.above == std::count_if(keys.begin(), keys.end(), [&](std::int32_t x) { return x > expected; }));
      CHECK(kth.equal == std::count(keys.begin(), keys.end(), expected));
    }
  }
}

TEST_CASE("a sample that misleads costs passes, not the result") {
  const auto check = [](auto passes) {
    using P = decltype(passes);
    std::vector<std::uint32_t> bins(detail::radix_bins);
    for (const std::int32_t planted : {-1000000, 0, 1000000}) {  // what every sampled key is replaced by
      std::vector<std::int32_t> keys(9000);
      std::mt19937 random(3);
      for (std::int32_t& key : keys) key = static_cast<std::int32_t>(random() % 2001) - 1000;
      std::vector<std::int32_t> sample(P::short_sample);
      const auto plant = [&](std::int64_t i) { return keys[static_cast<std::size_t>(i)] = planted; };
      detail::take_sample(plant, 9000, P::short_sample, sample.data());
      std::vector<std::int32_t> sorted = keys;
      std::sort(sorted.begin(), sorted.end(), std::greater<>{});
      for (const std::int64_t k : {1, 20, 1000, 4500, 8900, 9000})
        for (const std::int64_t room : {9000, 30000}) {
          std::vector<std::int32_t> work(static_cast<std::size_t>(room + P::slack));
          std::copy(keys.begin(), keys.end(), work.begin());
          const detail::KthKey kth =
              detail::kth_of_keys<P>(work.data(), 9000, room, k, {-1000000, 1000000}, bins.data());
          const std::int32_t expected = sorted[static_cast<std::size_t>(k - 1)];
          CHECK(kth.key == expected);
          CHECK(kth.above == std::count_if(keys.begin(), keys.end(), [&](std::int32_t x) { return x > expected; }));
          CHECK(kth.equal == std::count(keys.begin(), keys.end(), expected));
        }
    }
  };
  check(detail::Passes{});
  check(detail::PortablePasses{});
}

TEST_CASE("flat counts: the best of all rows together, counted per row") {
  const std::vector<float> scores{9, 1, 8, 2,   // row 0
                                  7, 7, 7, 7,   // row 1
                                  3, 9, 0, 5};  // row 2
  const Matrix<const float> matrix{scores.data(), 3, 4, 4};
  std::vector<std::byte> scratch(flat_topk_scratch_bytes(3, 4));
  const auto counts = [&](std::vector<IndexRange> candidates, std::int64_t k) {
    Indices out(3, -1);
    flat_topk_counts(matrix, candidates, k, out, scratch);
    return out;
  };
  const IndexRange all{0, 4}, none{};
  CHECK(counts({all, all, all}, 0) == Indices{0, 0, 0});
  CHECK(counts({all, all, all}, 1) == Indices{1, 0, 0});  // 9 twice: the lower row
  CHECK(counts({all, all, all}, 3) == Indices{2, 0, 1});
  CHECK(counts({all, all, all}, 5) == Indices{2, 2, 1});
  CHECK(counts({all, all, all}, 12) == Indices{4, 4, 4});
  CHECK(counts({all, none, all}, 4) == Indices{2, 0, 2});          // an empty range takes no part
  CHECK(counts({{1, 3}, {1, 3}, {0, 1}}, 2) == Indices{1, 1, 0});  // columns outside are not looked at
  CHECK_THROWS_AS(counts({{0, 5}, all, all}, 2), std::invalid_argument);
  CHECK_THROWS_AS(counts({all, none, all}, 9), std::invalid_argument);
  CHECK_THROWS_AS(counts({all, all}, 1), std::invalid_argument);
}

TEST_CASE("flat counts agree with a sort of all candidates") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 150; ++trial) {
    const auto rows = static_cast<index_t>(1 + random() % 9);
    const auto cols = static_cast<index_t>(random() % (trial % 10 == 0 ? 3000 : 90));
    const std::uint32_t levels = trial % 3 == 0 ? 4 : 100000;
    std::vector<float> scores(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
    for (float& x : scores) x = static_cast<float>(random() % levels) - static_cast<float>(levels / 2);
    std::vector<IndexRange> candidates;
    std::vector<std::pair<float, index_t>> entries;  // score, row: in order of row and index
    for (index_t r = 0; r < rows; ++r) {
      const auto begin = static_cast<index_t>(cols > 0 ? random() % static_cast<std::uint32_t>(cols) : 0);
      candidates.push_back(trial % 4 == 0 ? IndexRange{0, cols} : IndexRange{begin, cols - (cols - begin) / 3});
      for (index_t c = candidates.back().begin; c < candidates.back().end; ++c)
        entries.emplace_back(
            scores[static_cast<std::size_t>(r) * static_cast<std::size_t>(cols) + static_cast<std::size_t>(c)], r);
    }
    std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    const std::size_t k = random() % (entries.size() + 1);
    Indices expected(static_cast<std::size_t>(rows), 0), counts(expected);
    for (std::size_t i = 0; i < k; ++i) ++expected[static_cast<std::size_t>(entries[i].second)];
    std::vector<std::byte> scratch(flat_topk_scratch_bytes(rows, cols));
    flat_topk_counts({scores.data(), rows, cols, cols}, candidates, static_cast<std::int64_t>(k), counts, scratch);
    CHECK_MESSAGE(counts == expected, "trial ", trial);
  }
}

TEST_CASE("flat counts: a NaN among the candidates names row and token, one outside is not seen") {
  const std::vector<float> scores{1, 2, nan, 4, 5, 6};
  std::vector<std::byte> scratch(flat_topk_scratch_bytes(2, 3));
  Indices counts(2);
  const Matrix<const float> matrix{scores.data(), 2, 3, 3};
  for (const std::int64_t k : {0, 2, 6}) {
    bool thrown = false;
    try {
      flat_topk_counts(matrix, std::vector<IndexRange>{{0, 3}, {0, 3}}, k, counts, scratch);
    } catch (const NanScore& error) {
      thrown = true;
      CHECK(error.row == 0);
      CHECK(error.token == 2);
    }
    CHECK(thrown);
  }
  flat_topk_counts(matrix, std::vector<IndexRange>{{0, 2}, {0, 3}}, 2, counts, scratch);
  CHECK(counts == Indices{0, 2});
}

TEST_CASE("many rows, each with its length and its k, for any number of threads") {
  const std::vector<float> scores{1, 3, 2, 9,   // length 3
                                  5, 5, 5, 5,   // length 4
                                  4, 0, 0, 0};  // length 1
  const Matrix<const float> matrix{scores.data(), 3, 4, 4};
  const Indices lengths{3, 4, 1};
  const std::vector<std::int64_t> offsets{0, 2, 5, 5};
  for (const int threads : {1, 2, 7}) {
    Indices out(5, -1);
    topk_rows({threads}, matrix, lengths, offsets, out);
    CHECK(out == Indices{1, 2, 0, 1, 2});
  }
  Indices out(5);
  CHECK_THROWS_AS(topk_rows({}, matrix, lengths, std::vector<std::int64_t>{0, 4, 5, 5}, out), std::invalid_argument);
  CHECK_THROWS_AS(topk_rows({}, matrix, Indices{5, 4, 1}, offsets, out), std::invalid_argument);
  CHECK_THROWS_AS(topk_rows({}, matrix, lengths, offsets, std::span(out).first(4)), std::invalid_argument);
  std::vector<float> bad = scores;
  bad[5] = nan;
  bool thrown = false;
  try {
    topk_rows({2}, {bad.data(), 3, 4, 4}, lengths, offsets, out);
  } catch (const NanScore& error) {
    thrown = true;
    CHECK(error.row == 1);
    CHECK(error.token == 1);
  }
  CHECK(thrown);
}

}  // namespace kvevict
