#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "kvevict/core/half.hpp"

using namespace kvevict;

TEST_CASE("every fp16 value survives the way through float") {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const fp16_t x{static_cast<std::uint16_t>(bits)};
    const float f = to_float(x);
    if (std::isnan(f)) {
      CHECK(std::isnan(to_float(from_float<fp16_t>(f))));
    } else if (!(from_float<fp16_t>(f) == x)) {
      FAIL("bits ", bits, " come back as ", from_float<fp16_t>(f).bits);
    }
  }
}

TEST_CASE("every bf16 value survives the way through float") {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bf16_t x{static_cast<std::uint16_t>(bits)};
    const float f = to_float(x);
    if (std::isnan(f)) {
      CHECK(std::isnan(to_float(from_float<bf16_t>(f))));
    } else if (!(from_float<bf16_t>(f) == x)) {
      FAIL("bits ", bits, " come back as ", from_float<bf16_t>(f).bits);
    }
  }
}

TEST_CASE("known fp16 values") {
  CHECK(to_float(fp16_t{0x3c00}) == 1.f);
  CHECK(to_float(fp16_t{0x7bff}) == 65504.f);
  CHECK(to_float(fp16_t{0x0001}) == 0x1p-24f);  // smallest subnormal
  CHECK(to_float(fp16_t{0x0400}) == 0x1p-14f);  // smallest normal
  CHECK(to_float(fp16_t{0xfc00}) == -std::numeric_limits<float>::infinity());
  CHECK(std::signbit(to_float(fp16_t{0x8000})));
}

TEST_CASE("rounding is to nearest, ties to even, with overflow to infinity") {
  CHECK(from_float<fp16_t>(1.f + 0x1p-11f).bits == 0x3c00);             // halfway between 1 and 1 + 2^-10: even is 1
  CHECK(from_float<fp16_t>(1.f + 3 * 0x1p-11f).bits == 0x3c02);         // halfway, even is above
  CHECK(from_float<fp16_t>(1.f + 0x1p-11f + 0x1p-20f).bits == 0x3c01);  // above halfway
  CHECK(from_float<fp16_t>(65519.9f).bits == 0x7bff);
  CHECK(from_float<fp16_t>(65520.f).bits == 0x7c00);
  CHECK(from_float<fp16_t>(0x1p-25f).bits == 0x0000);  // halfway to the smallest: even is 0
  CHECK(from_float<fp16_t>(0x1p-25f * 1.0001f).bits == 0x0001);
  CHECK(from_float<fp16_t>(-3 * 0x1p-25f).bits == 0x8002);  // 1.5 units: even is 2
  CHECK(from_float<bf16_t>(1.f + 0x1p-8f).bits == 0x3f80);
  CHECK(from_float<bf16_t>(1.f + 3 * 0x1p-8f).bits == 0x3f82);
  CHECK(from_float<bf16_t>(std::numeric_limits<float>::max()).bits == 0x7f80);
}
