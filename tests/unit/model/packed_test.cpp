#include "kvevict/model/packed.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

using namespace kvevict;

namespace {

float value(index_t i, index_t j) { return static_cast<float>((i * 31 + j * 17) % 41 - 20) / 8.f; }

struct Problem {
  index_t rows, inputs, outputs;
  PackedMatrix w;
  std::vector<float> x, bias;

  Problem(index_t n, index_t in, index_t out) : rows(n), inputs(in), outputs(out), w(out, in) {
    for (index_t o = 0; o < out; ++o) w.set_row(o, [o](index_t i) { return value(o, i); });
    for (index_t r = 0; r < n; ++r)
      for (index_t i = 0; i < in; ++i) x.push_back(value(r + 3, i));
    for (index_t o = 0; o < out; ++o) bias.push_back(static_cast<float>(o));
  }
  std::vector<float> product(const host_exec& exec, index_t first, index_t count, bool biased, bool accumulate) const {
    std::vector<float> y(static_cast<std::size_t>(count) * static_cast<std::size_t>(outputs), 1000.f);
    w.multiply(exec, {x.data() + first * inputs, count, inputs, inputs}, biased ? bias : std::vector<float>(),
               {y.data(), count, outputs, outputs}, accumulate);
    return y;
  }
};

}  // namespace

TEST_CASE("a packed product is x W^T, with bias and on top of what was there") {
  // Sums of multiples of 1/64 far below 2^17: exact in float, so that equality is the right question.
  for (const auto& [n, in, out] :
       {std::array<index_t, 3>{1, 1, 1}, {5, 7, 33}, {13, 64, 64}, {100, 3, 70}, {2, 2500, 5}}) {
    const Problem p(n, in, out);
    for (const bool biased : {false, true})
      for (const bool accumulate : {false, true}) {
        const auto y = p.product({}, 0, n, biased, accumulate);
        bool same = true;
        for (index_t r = 0; r < n; ++r)
          for (index_t o = 0; o < out; ++o) {
            float sum = 0;
            for (index_t i = 0; i < in; ++i) sum += value(r + 3, i) * value(o, i);
            sum += (accumulate ? 1000.f : 0.f) + (biased ? static_cast<float>(o) : 0.f);
            same = same && y[static_cast<std::size_t>(r * out + o)] == sum;
          }
        CHECK(same);
      }
  }
}

TEST_CASE("a row of the product is the same alone, among others and with any number of threads") {
  Problem p(61, 90, 130);
  for (float& v : p.x) v = std::sin(v * 3.7f);  // inexact sums
  const auto whole = p.product({1}, 0, 61, true, true);
  CHECK(p.product({4}, 0, 61, true, true) == whole);
  for (const index_t r : {0, 17, 60}) {
    const auto row = p.product({1}, r, 1, true, true);
    CHECK(std::equal(row.begin(), row.end(), whole.begin() + r * 130));
  }
}

TEST_CASE("rows can be read back, and the transpose is the transpose") {
  const Problem p(1, 37, 45);
  std::vector<float> row(37), column(45);
  p.w.row(40, row.data());
  CHECK(row[5] == value(40, 5));
  const PackedMatrix t = p.w.transposed();
  CHECK(t.outputs() == 37);
  t.row(5, column.data());
  CHECK(column[40] == value(40, 5));
  CHECK(column[0] == value(0, 5));
}

TEST_CASE("shapes that do not fit are refused with all of them") {
  const PackedMatrix w(4, 3);
  std::vector<float> x(6), y(8);
  CHECK_THROWS_WITH(w.multiply({}, {x.data(), 2, 2, 2}, {}, {y.data(), 2, 4, 4}),
                    doctest::Contains("x [2, 2] and y [2, 4] do not fit W [4, 3]"));
}
