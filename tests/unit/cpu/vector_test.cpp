#include "kvevict/cpu/vector.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kvevict/core/half.hpp"

namespace {
using namespace kvevict;
using Row = std::vector<float>;

Row exp2_of(const Row& x) {
  Row in(x), out(x.size());
  const std::size_t padded = (x.size() + simd::width - 1) / simd::width * simd::width;
  in.resize(padded);
  out.resize(padded);
  for (std::size_t i = 0; i < padded; i += simd::width)
    simd::store(simd::exp2(simd::load(in.data() + i)), out.data() + i);
  out.resize(x.size());
  return out;
}

TEST_CASE("the kernel's 2^x has a relative error below 1e-7 wherever the result is a normal number") {
  Row x;
  for (int i = -126 * 4096; i <= 126 * 4096; ++i) x.push_back(static_cast<float>(i) / 4096 + 1e-5f);
  x.front() = -126.f;
  x.back() = 126.f;
  const Row y = exp2_of(x);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) / std::exp2(static_cast<double>(x[i])) - 1));
  CHECK(worst < 1e-7);
  CHECK(worst > 1e-8);  // or this test would not be looking at float32
}

TEST_CASE("2^x is exact at whole numbers, 0 far below, clamped far above, and NaN stays NaN") {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(exp2_of({0, 1, -1, 10, -126, 126}) == Row{1, 2, .5f, 1024, 0x1p-126f, 0x1p126f});
  CHECK(exp2_of({-127, -150.2f, -1e30f, -infinity}) == Row{0, 0, 0, 0});  // e^-104 and below among them
  CHECK(exp2_of({127, 1e30f, infinity}) == Row{0x1p126f, 0x1p126f, 0x1p126f});
  const Row y = exp2_of({nan, -nan, std::nanf("0x12345")});
  CHECK(std::all_of(y.begin(), y.end(), [](float v) { return std::isnan(v); }));
}

TEST_CASE("16-bit numbers are widened to exactly their value, subnormals included") {
  const auto check = [](auto element) {
    using T = decltype(element);
    Row out(simd::width);
    int wrong = 0;
    for (std::uint32_t first = 0; first < 0x10000; first += simd::width) {
      std::vector<T> in(simd::width);
      for (std::size_t i = 0; i < in.size(); ++i) in[i].bits = static_cast<std::uint16_t>(first + i);
      simd::store(simd::widen(in.data()), out.data());
      for (std::size_t i = 0; i < in.size(); ++i)
        wrong += !(out[i] == to_float(in[i]) || (std::isnan(out[i]) && std::isnan(to_float(in[i]))));
    }
    CHECK(wrong == 0);
  };
  check(fp16_t{});
  check(bf16_t{});
}

}  // namespace

namespace {
float exp_of(float x) { return simd::first(simd::exp(simd::set(x))); }
float silu_of(float x) { return simd::first(simd::silu(simd::set(x))); }
}  // namespace

TEST_CASE("e^x is accurate, 0 far below, infinite far above, and NaN stays NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  double worst = 0;
  for (float x = -87.f; x < 88.f; x += 0.0371f)
    worst = std::max(worst, std::abs(static_cast<double>(exp_of(x)) / std::exp(static_cast<double>(x)) - 1));
  CHECK(worst < 2.5e-7);
  CHECK(worst > 1e-8);
  CHECK(exp_of(0.f) == 1.f);
  for (const float x : {-87.01f, -100.f, -1e30f, -infinity}) CHECK(exp_of(x) == 0.f);
  for (const float x : {88.8f, 1000.f, 1e30f, infinity}) CHECK(exp_of(x) == infinity);
  CHECK(std::isnan(exp_of(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("silu is x / (1 + e^-x) at every size of x") {
  const float infinity = std::numeric_limits<float>::infinity();
  double worst = 0;
  for (float x = -80.f; x < 80.f; x += 0.0137f) {
    const double exact = static_cast<double>(x) / (1 + std::exp(-static_cast<double>(x)));
    worst = std::max(worst, std::abs(static_cast<double>(silu_of(x)) - exact) / std::max(std::abs(exact), 1e-30));
  }
  CHECK(worst < 4e-7);
  CHECK(silu_of(0.f) == 0.f);
  for (const float x : {89.f, 1e18f, 3e38f, infinity}) CHECK(silu_of(x) == x);
  for (const float x : {-89.f, -1e18f, -3e38f}) CHECK(silu_of(x) == 0.f);
  CHECK(std::isnan(silu_of(-infinity)));
  CHECK(std::isnan(silu_of(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("lanes are chosen, summed and compared one by one") {
  Row a(simd::width), b(simd::width), out(simd::width);
  for (std::size_t i = 0; i < simd::width; ++i) {
    a[i] = static_cast<float>(i * 5 % 7);
    b[i] = static_cast<float>(i * 3 % 5);
  }
  const auto va = simd::load(a.data()), vb = simd::load(b.data());
  simd::store(simd::if_greater(va, vb, simd::set(1.f), simd::neg(vb)), out.data());
  float sum = 0, largest = 0;
  for (std::size_t i = 0; i < simd::width; ++i) {
    CHECK(out[i] == (a[i] > b[i] ? 1.f : -b[i]));
    sum += a[i];
    largest = std::max(largest, a[i]);
  }
  CHECK(simd::sum(va) == sum);
  CHECK(simd::max_of(va) == largest);
  CHECK(simd::first(simd::neg_mul_add(simd::set(2.f), simd::set(3.f), simd::set(10.f))) == 4.f);
  CHECK(simd::first(simd::div(simd::set(3.f), simd::set(4.f))) == 0.75f);
}

TEST_CASE("a square of rows is transposed") {
  simd::Vec rows[simd::width];
  Row line(simd::width);
  for (std::size_t r = 0; r < simd::width; ++r) {
    for (std::size_t c = 0; c < simd::width; ++c) line[c] = static_cast<float>(100 * r + c);
    rows[r] = simd::load(line.data());
  }
  simd::transpose(rows);
  int wrong = 0;
  for (std::size_t r = 0; r < simd::width; ++r) {
    simd::store(rows[r], line.data());
    for (std::size_t c = 0; c < simd::width; ++c) wrong += line[c] != static_cast<float>(100 * c + r);
  }
  CHECK(wrong == 0);
}

TEST_CASE("rows of any length and stride are widened") {
  std::vector<fp16_t> in;
  for (int i = 0; i < 100; ++i) in.push_back(from_float<fp16_t>(static_cast<float>(i) / 4));
  for (index_t cols = 0; cols < 40; ++cols)
    for (const std::int64_t stride : {1, 2}) {
      Row out(41, -1.f);
      simd::widen_row(in.data(), stride, cols, out.data());
      for (index_t c = 0; c < cols; ++c) CHECK(out[static_cast<std::size_t>(c)] == static_cast<float>(c * stride) / 4);
      CHECK(out[static_cast<std::size_t>(cols)] == -1.f);
    }
}
