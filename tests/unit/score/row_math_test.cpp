#include "kvevict/score/detail/row_math.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <vector>

using namespace kvevict;

TEST_CASE("widening without branches equals to_float for every half-precision value, bit for bit") {
  int differ = 0;
  for (std::uint32_t b = 0; b < 65536; ++b) {
    const auto bits = static_cast<std::uint16_t>(b);
    differ += std::bit_cast<std::uint32_t>(detail::widen(fp16_t{bits})) !=
              std::bit_cast<std::uint32_t>(to_float(fp16_t{bits}));
    differ += std::bit_cast<std::uint32_t>(detail::widen(bf16_t{bits})) !=
              std::bit_cast<std::uint32_t>(to_float(bf16_t{bits}));
  }
  CHECK(differ == 0);
}

TEST_CASE("dot products cover every length, and float rows are used in place") {
  std::vector<float> a, b;
  for (index_t n = 0; n < 70; ++n) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    CHECK(detail::dot(a.data(), b.data(), n) == sum);  // small integers: exact in any order
    CHECK(detail::dot_double(a.data(), b.data(), n) == sum);
    a.push_back(static_cast<float>(n % 7 - 3));
    b.push_back(static_cast<float>(n % 5));
  }
  std::vector<float> buffer(8);
  const std::vector<float> rows{1, 2, 3, 4};
  CHECK(detail::float_row(dense_rows(rows.data(), 2, 2), 1, buffer.data()) == rows.data() + 2);
  const Rows<const float> columns{rows.data(), 2, 2, 1, 2};
  CHECK(detail::float_row(columns, 1, buffer.data()) == buffer.data());
  CHECK(buffer[0] == 2);
  CHECK(buffer[1] == 4);
}
