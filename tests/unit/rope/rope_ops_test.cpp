#include "kvevict/rope/rope_ops.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

using namespace kvevict;

namespace {

using V = std::vector<index_t>;

std::vector<float> frequencies(index_t rotary) {
  std::vector<float> out;
  for (index_t i = 0; i < rotary / 2; ++i)
    out.push_back(std::pow(10000.f, -2.f * static_cast<float>(i) / static_cast<float>(rotary)));
  return out;
}

std::vector<float> noise(index_t rows, index_t dim) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> out;
  for (index_t i = 0; i < rows * dim; ++i) out.push_back(normal(random));
  return out;
}

V counting(index_t n, index_t first = 0) {
  V out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), first);
  return out;
}

double furthest(const std::vector<float>& a, const std::vector<float>& b) {
  double out = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    out = std::max(out, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return out;
}

}  // namespace

TEST_CASE("rotate rotates each pair by position times frequency, in both pairings") {
  const std::vector<float> freq{1.f, 0.5f};
  std::vector<float> half{1, 2, 3, 4}, inter{1, 3, 2, 4};  // pairs (1, 3) and (2, 4)
  rotate(Rope{RopeStyle::half, 4, freq}, dense_rows(half.data(), 1, 4), V{2});
  rotate(Rope{RopeStyle::interleaved, 4, freq}, dense_rows(inter.data(), 1, 4), V{2});
  CHECK(half[0] == doctest::Approx(std::cos(2.0) - 3 * std::sin(2.0)));
  CHECK(half[2] == doctest::Approx(3 * std::cos(2.0) + std::sin(2.0)));
  CHECK(half[1] == doctest::Approx(2 * std::cos(1.0) - 4 * std::sin(1.0)));
  CHECK(half[3] == doctest::Approx(4 * std::cos(1.0) + 2 * std::sin(1.0)));
  CHECK(inter == std::vector<float>{half[0], half[2], half[1], half[3]});
}

TEST_CASE("rotate_inverse is the inverse of rotate, attention factor included") {
  const auto freq = frequencies(16), raw = noise(20, 16);
  Rope rope{RopeStyle::half, 16, freq, 1.3f};
  auto rows = raw;
  rotate(rope, dense_rows(rows.data(), 20, 16), counting(20, 1000));
  auto longer = raw;
  rope.attention_factor = 2.6f;
  rotate(rope, dense_rows(longer.data(), 20, 16), counting(20, 1000));
  CHECK(longer[7] == doctest::Approx(2 * rows[7]));
  rope.attention_factor = 1.3f;
  rotate_inverse(rope, dense_rows(rows.data(), 20, 16), counting(20, 1000));
  CHECK(furthest(rows, raw) < 1e-5);
}

TEST_CASE("U26: sinks and newest rows, moved to their slots, equal raw keys rotated at the slots") {
  const auto freq = frequencies(32), raw = noise(32, 32);
  const Rope rope{RopeStyle::half, 32, freq, 1.2f};
  auto rotated = raw;
  rotate(rope, dense_rows(rotated.data(), 32, 32), counting(32));
  V kept = counting(4);
  for (index_t p = 24; p < 32; ++p) kept.push_back(p);
  std::vector<float> moved, want;
  for (const index_t p : kept) {
    moved.insert(moved.end(), rotated.begin() + p * 32, rotated.begin() + (p + 1) * 32);
    want.insert(want.end(), raw.begin() + p * 32, raw.begin() + (p + 1) * 32);
  }
  shift(rope, dense_rows(moved.data(), 12, 32), kept, counting(12));
  rotate(rope, dense_rows(want.data(), 12, 32), counting(12));
  CHECK(furthest(moved, want) < 1e-5);
  CHECK(std::equal(moved.begin(), moved.begin() + 4 * 32, rotated.begin()));  // rows that stay keep their bits
}

TEST_CASE("U27: moving all rows and the query by the same distance leaves the logits as they are") {
  const auto freq = frequencies(16);
  const Rope rope{RopeStyle::interleaved, 16, freq};
  auto keys = noise(10, 16), query = noise(1, 16);
  const auto logit = [&](std::size_t row) {
    double sum = 0;
    for (std::size_t c = 0; c < 16; ++c) sum += static_cast<double>(keys[row * 16 + c]) * static_cast<double>(query[c]);
    return sum;
  };
  rotate(rope, dense_rows(keys.data(), 10, 16), counting(10, 500));
  rotate(rope, dense_rows(query.data(), 1, 16), V{510});
  std::vector<double> before, after;
  for (std::size_t r = 0; r < 10; ++r) before.push_back(logit(r));
  shift(rope, dense_rows(keys.data(), 10, 16), counting(10, 500), counting(10));
  shift(rope, dense_rows(query.data(), 1, 16), V{510}, V{10});
  for (std::size_t r = 0; r < 10; ++r) CHECK(logit(r) == doctest::Approx(before[r]).epsilon(1e-5).scale(16));
}

TEST_CASE("U28: a shift after a rotation equals the rotation at the new position, float32 and half precision") {
  const auto freq = frequencies(64), raw = noise(50, 64);
  const Rope rope{RopeStyle::half, 64, freq};
  const V from = counting(50, 7), to = counting(50, 4007);
  auto moved = raw, want = raw;
  rotate(rope, dense_rows(moved.data(), 50, 64), from);
  shift(rope, dense_rows(moved.data(), 50, 64), from, to);
  rotate(rope, dense_rows(want.data(), 50, 64), to);
  CHECK(furthest(moved, want) < 1e-5);

  // binary16: two roundings of relative error 2^-11 on elements of length at most |pair|.
  std::vector<fp16_t> half;
  for (const float x : raw) half.push_back(from_float<fp16_t>(x));
  rotate(rope, dense_rows(half.data(), 50, 64), from);
  shift(rope, dense_rows(half.data(), 50, 64), from, to);
  for (std::size_t i = 0; i < half.size(); ++i) {
    const std::size_t partner = i % 64 < 32 ? i + 32 : i - 32;
    CHECK(std::abs(to_float(half[i]) - want[i]) <= 4 * 0x1p-11f * std::hypot(want[i], want[partner]));
  }
}

TEST_CASE("U31: elements from rotary_dim on keep their bits") {
  const auto freq = frequencies(8), raw = noise(6, 16);
  for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved}) {
    const Rope rope{style, 8, freq, 1.5f};
    auto rows = raw;
    rotate(rope, dense_rows(rows.data(), 6, 16), counting(6, 3));
    shift(rope, dense_rows(rows.data(), 6, 16), counting(6, 3), counting(6, 90));
    for (std::size_t r = 0; r < 6; ++r) {
      CHECK(std::equal(rows.begin() + static_cast<std::ptrdiff_t>(r * 16 + 8),
                       rows.begin() + static_cast<std::ptrdiff_t>(r * 16 + 16),
                       raw.begin() + static_cast<std::ptrdiff_t>(r * 16 + 8)));
      CHECK(rows[r * 16] != raw[r * 16]);
    }
  }
}

TEST_CASE("U32: rows that cannot be moved are refused with the reason") {
  const auto freq = frequencies(8);
  Rope rope{RopeStyle::half, 8, freq};
  CHECK(can_shift(rope));
  rope.no_shift = "M-RoPE: a token has three positions";
  CHECK_FALSE(can_shift(rope));
  std::vector<float> rows(8, 1.f);
  CHECK_THROWS_WITH_AS(shift(rope, dense_rows(rows.data(), 1, 8), V{4}, V{0}),
                       "shift: these rows cannot be moved: M-RoPE: a token has three positions", std::invalid_argument);
  CHECK_FALSE(can_shift(Rope{}));
}

TEST_CASE("a rotation that does not fit its rows is refused") {
  const auto freq = frequencies(8);
  std::vector<float> rows(16, 1.f);
  const auto two = dense_rows(rows.data(), 2, 8);
  CHECK_THROWS_AS(rotate(Rope{RopeStyle::half, 8, freq}, two, V{1}), std::invalid_argument);
  CHECK_THROWS_AS(rotate(Rope{RopeStyle::half, 10, freq}, two, V{1, 2}), std::invalid_argument);
  CHECK_THROWS_AS(rotate(Rope{RopeStyle::half, 6, freq}, two, V{1, 2}), std::invalid_argument);
  CHECK_THROWS_AS(rotate(Rope{RopeStyle::half, 8, freq, 0.f}, two, V{1, 2}), std::invalid_argument);
  CHECK_THROWS_AS(shift(Rope{RopeStyle::half, 8, freq}, two, V{1, 2}, V{1}), std::invalid_argument);
}

TEST_CASE("rows may be strided, transposed or in blocks") {
  const auto freq = frequencies(4), raw = noise(4, 4);
  const Rope rope{RopeStyle::half, 4, freq};
  auto want = raw;
  rotate(rope, dense_rows(want.data(), 4, 4), V{5, 9, 11, 12});
  std::vector<float> columns(16), blocks(16);
  const V table{1, 0};
  for (std::size_t r = 0; r < 4; ++r)
    for (std::size_t c = 0; c < 4; ++c) {
      columns[c * 4 + r] = raw[r * 4 + c];
      blocks[static_cast<std::size_t>(table[r / 2]) * 8 + r % 2 * 4 + c] = raw[r * 4 + c];
    }
  rotate(rope, Rows<float>{columns.data(), 4, 4, 1, 4}, V{5, 9, 11, 12});
  rotate(rope, Rows<float>{blocks.data(), 4, 4, 4, 1, table.data(), 2, 8}, V{5, 9, 11, 12});
  for (std::size_t r = 0; r < 4; ++r)
    for (std::size_t c = 0; c < 4; ++c) {
      CHECK(columns[c * 4 + r] == want[r * 4 + c]);
      CHECK(blocks[static_cast<std::size_t>(table[r / 2]) * 8 + r % 2 * 4 + c] == want[r * 4 + c]);
    }
}

TEST_CASE("the mean rotation is the mean of rotations") {
  const auto freq = frequencies(12);
  for (const index_t count : {1, 2, 512}) {
    const Rope rope{RopeStyle::interleaved, 12, freq, 1.1f};
    std::vector<double> x(14, 1.0), want(14, 0.0);
    for (index_t p = 700; p < 700 + count; ++p) {
      std::vector<float> row(14, 1.f);
      rotate(rope, dense_rows(row.data(), 1, 14), V{p});
      for (std::size_t i = 0; i < 14; ++i) want[i] += static_cast<double>(row[i]) / count;
    }
    MeanRotation(rope, 700, count).apply(x.data(), 1);
    for (std::size_t i = 0; i < 14; ++i) CHECK(x[i] == doctest::Approx(want[i]).epsilon(1e-6));
  }
}
