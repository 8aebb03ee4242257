#include "kvevict/core/error.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

using namespace kvevict;

namespace {

template <class... Parts>
std::string streamed(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace

TEST_CASE("text is joined as streams print it") {
  const std::string text = "text";
  const std::string_view view(text.data() + 1, 2);
  CHECK(joined_text(text, view, "literal", 'c', true, false) == streamed(text, view, "literal", 'c', true, false));
  CHECK(joined_text() == "");
  CHECK(joined_text(std::string_view{}, std::string(300, 'x')) == std::string(300, 'x'));
  const auto same = [](auto x) { CHECK(joined_text('<', x, '>') == streamed('<', x, '>')); };
  same(0);
  same(-17);
  same(std::numeric_limits<std::int64_t>::min());
  same(std::numeric_limits<std::int64_t>::max());
  same(std::numeric_limits<std::uint64_t>::max());
  same(std::int16_t{-5});
  for (const double x : {0.0, -0.0, 1.0, 0.1, 1. / 3, 2e-5, 1e-4, 123456.0, 1234567.0, 999999.5, 0.29, 1e300, 5e-324,
                         -2.5, 100000.0, 1e6, std::numeric_limits<double>::infinity(),
                         -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    same(x);
    same(static_cast<float>(x));
  }
}

TEST_CASE("each kind of fault is an exception of its own") {
  CHECK_THROWS_WITH_AS(fail_argument("row ", 3, " of ", 2u), "row 3 of 2", std::invalid_argument);
  CHECK_THROWS_WITH_AS(fail_domain("score ", 0.5f), "score 0.5", std::domain_error);
  CHECK_THROWS_WITH_AS(fail_format(std::string("file"), ": ", 'x'), "file: x", format_error);
}
