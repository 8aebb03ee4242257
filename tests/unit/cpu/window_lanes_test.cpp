#include "kvevict/cpu/detail/window_lanes.hpp"

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
  const std::size_t padded = (x.size() + detail::lanes::width - 1) / detail::lanes::width * detail::lanes::width;
  in.resize(padded);
  out.resize(padded);
  for (std::size_t i = 0; i < padded; i += detail::lanes::width)
    detail::lanes::store(detail::lanes::exp2(detail::lanes::load(in.data() + i)), out.data() + i);
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
    Row out(detail::lanes::width);
    int wrong = 0;
    for (std::uint32_t first = 0; first < 0x10000; first += detail::lanes::width) {
      std::vector<T> in(detail::lanes::width);
      for (std::size_t i = 0; i < in.size(); ++i) in[i].bits = static_cast<std::uint16_t>(first + i);
      detail::lanes::store(detail::lanes::widen(in.data()), out.data());
      for (std::size_t i = 0; i < in.size(); ++i)
        wrong += !(out[i] == to_float(in[i]) || (std::isnan(out[i]) && std::isnan(to_float(in[i]))));
    }
    CHECK(wrong == 0);
  };
  check(fp16_t{});
  check(bf16_t{});
}

}  // namespace
