#include "kvevict/rope/rope_table.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kvevict/core/rows.hpp"
#include "kvevict/rope/frequencies.hpp"
#include "kvevict/rope/rope_ops.hpp"

using namespace kvevict;

namespace {
std::vector<float> counted(index_t n) {
  std::vector<float> out;
  for (index_t i = 0; i < n; ++i) out.push_back(0.1f * static_cast<float>(i * 7 % 11) - 0.5f);
  return out;
}
double furthest(const std::vector<float>& a, const std::vector<float>& b) {
  double out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) out = std::max(out, std::abs(static_cast<double>(a[i] - b[i])));
  return out;
}
}  // namespace

TEST_CASE("frequencies are theta^(-2i / dim), rounded once") {
  const auto f = rope_frequencies(10000, 8);
  CHECK(f == std::vector<float>{1.f, 0.1f, 0.01f, 0.001f});
}

TEST_CASE("a table of exact angles rotates as rotate() does, bit for bit, and back again") {
  const auto freq = rope_frequencies(10000, 12), raw = counted(16);
  for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved}) {
    const Rope rope{style, 12, freq, 1.25f};
    RopeTable<float, RopeAngle::float64> table;
    std::vector<index_t> positions{0, 3, 4000};
    for (const index_t p : positions) table.add(rope, p, static_cast<double>(rope.attention_factor));
    CHECK(table.rows() == 3);
    for (index_t r = 0; r < 3; ++r) {
      auto a = raw, b = raw;
      table.rotate(r, a.data());
      rotate(rope, dense_rows(b.data(), 1, 16), std::span(positions).subspan(static_cast<std::size_t>(r), 1));
      CHECK(a == b);
      CHECK(furthest(a, raw) > 0.01);
      table.rotate_inverse(r, a.data());  // the transposed rotation: length times factor squared
      for (std::size_t i = 0; i < 12; ++i) CHECK(a[i] == doctest::Approx(1.5625 * raw[i]));
      CHECK(a[14] == raw[14]);
    }
  }
}

TEST_CASE("angles of models are rounded to float32 before the cosine is taken") {
  const std::vector<float> freq{0.7f};
  const Rope rope{RopeStyle::half, 2, freq};
  RopeTable<double, RopeAngle::float32> rounded;
  RopeTable<double, RopeAngle::float64> exact;
  rounded.add(rope, 100003, 1.0);
  exact.add(rope, 100003, 1.0);
  CHECK(rounded.cosines(0)[0] == std::cos(static_cast<double>(100003.f * 0.7f)));
  CHECK(exact.sines(0)[0] == std::sin(100003 * static_cast<double>(0.7f)));
  CHECK(rounded.cosines(0)[0] != exact.cosines(0)[0]);
}

TEST_CASE("the inverse rotation undoes rotate() at every position up to its last") {
  const auto freq = rope_frequencies(500000, 16), raw = counted(16);
  for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved}) {
    const Rope rope{style, 16, freq, 1.5f};
    const InverseRotation inverse(rope, 70000);
    for (const index_t p : {0, 1, 63, 64, 65, 4095, 69999, 70000}) {
      auto row = raw;
      rotate(rope, dense_rows(row.data(), 1, 16), std::vector<index_t>{p});
      inverse.apply(p, row.data());
      CHECK(furthest(row, raw) < 2e-6);
    }
  }
}
