#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/naming/registry.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"

using namespace kvevict;

namespace {

Registry registry() {
  Registry r;
  r.add_allocator<allocate::Uniform>();
  r.add_allocator<allocate::Pyramid>();
  r.add_scorer<score::KNorm>();
  r.add_scorer<score::Position>();
  r.add_preset("streamingllm", "uniform/position(sinks=4)", "");
  r.add_preset("tall", "pyramid(beta=8)/position", "");
  return r;
}

std::string error_of(const std::string& policy) {
  try {
    (void)registry().policy(policy);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("lists split at separators outside parentheses, angle brackets and quotes") {
  CHECK(split_outside("a,b(x=1,y=2),c<d(e=1,f=2)>/g", ',') ==
        std::vector<std::string>{"a", "b(x=1,y=2)", "c<d(e=1,f=2)>/g"});
  CHECK(split_outside("lkv(file=\"a,b/c\"), d", ',') == std::vector<std::string>{"lkv(file=\"a,b/c\")", "d"});
  CHECK_THROWS_AS(split_outside("a,,b", ','), std::invalid_argument);
  CHECK_THROWS_AS(split_outside("", ','), std::invalid_argument);
}

TEST_CASE("the grammar: nesting, arguments, quoted and worded values") {
  const PolicyText t = parse_policy("ada<pyramid(beta=20)>(floor=0.2)/snapkv(pool=max:7, file=\"a (b),c\")");
  CHECK(t.first.name == "ada");
  REQUIRE(t.first.base);
  CHECK(t.first.base->name == "pyramid");
  CHECK(t.first.base->args[0].second == "20");
  CHECK(t.first.args[0].first == "floor");
  REQUIRE(t.scorer);
  CHECK(t.scorer->args[0].second == "max:7");
  CHECK(t.scorer->args[1].second == "a (b),c");
}

TEST_CASE("messages give the usual value, not what was half read, and say what kind of part a name is") {
  CHECK(error_of("uniform/knorm(sinks=1e3)").find("is not a whole number, such as 0") != std::string::npos);
  CHECK(error_of("pyramid").find("it is an allocator: pyramid/snapkv") != std::string::npos);
  CHECK(error_of("knorm").find("it is a scorer: uniform/knorm") != std::string::npos);
}

TEST_CASE("syntax errors name the column") {
  CHECK(error_of("uniform/knorm(") == "policy 'uniform/knorm(': expected a parameter name at column 15, found the end");
  CHECK(error_of("uniform/knorm(sinks=1").find("column 22") != std::string::npos);
  CHECK(error_of("uniform/knorm)").find("expected the end at column 14, found ')'") != std::string::npos);
  CHECK(error_of("uniform<pyramid").find("expected '>'") != std::string::npos);
  CHECK(error_of("uniform/knorm(sinks=1,sinks=2)").find("given twice") != std::string::npos);
}

TEST_CASE("unknown names are answered with the nearest known ones") {
  CHECK(error_of("streamingllms").find("nearest known: streamingllm") != std::string::npos);
  CHECK(error_of("unifrom/knorm").find("unknown allocator 'unifrom'; nearest known: uniform") != std::string::npos);
  CHECK(error_of("uniform/norm").find("nearest known: knorm") != std::string::npos);
  CHECK(error_of("knorm").find("it is a scorer: uniform/knorm") != std::string::npos);
  CHECK(error_of("uniform/position(sink=3)").find("no parameter 'sink'; nearest known: sinks") != std::string::npos);
  CHECK(error_of("uniform/position(sinks=many)").find("a whole number") != std::string::npos);
  CHECK(error_of("uniform/position(protect=third)").find("one of half, full, score") != std::string::npos);
  CHECK(error_of("uniform<pyramid>/knorm").find("takes no nested allocator") != std::string::npos);
}

TEST_CASE("an argument of a preset goes to the scorer if it has such a parameter, else to the allocator") {
  CHECK(registry().policy("streamingllm(sinks=8)").specification() ==
        registry().policy("uniform/position(sinks=8)").specification());
  CHECK(registry().policy("tall(beta=10)").specification() ==
        registry().policy("pyramid(beta=10)/position").specification());
  CHECK(error_of("tall(height=3)").find("no parameter 'height'") != std::string::npos);
}

TEST_CASE("U49: the printed specification is complete and builds the same policy") {
  for (const char* name :
       {"streamingllm", "tall", "uniform(exact=true)/knorm", "pyramid(rounding=reference)/position"}) {
    const std::string spec = registry().policy(name).specification();
    CHECK(registry().policy(spec).specification() == spec);
  }
  CHECK(registry().policy("streamingllm").specification() ==
        "uniform(exact=false,rounding=floor)/position(sinks=4,protect=half)");
}
