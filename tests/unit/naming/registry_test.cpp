#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/naming/registry.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/chunks.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/random.hpp"

using namespace kvevict;

namespace {

// score::Chunks around knorm where nothing is named, which needs no kernel of its own.
template <class Base = score::KNorm>
using KNormChunks = score::Chunks<Base>;

Registry registry() {
  Registry r;
  r.add_allocator<allocate::Uniform>();
  r.add_allocator<allocate::Pyramid>();
  r.add_scorer<score::KNorm>();
  r.add_scorer<score::Position>();
  r.add_scorer<score::Random>();
  r.add_wrapping_scorer<KNormChunks>();
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

TEST_CASE("a scorer may wrap a scorer, in text and back") {
  CHECK(registry().policy("uniform/chunks").specification() ==
        "uniform(exact=false,rounding=floor)/chunks<knorm(sinks=0,protect=half)>(size=20)");
  const std::string nested =
      "uniform(exact=false,rounding=floor)/"
      "chunks<chunks<position(sinks=2,protect=full)>(size=3)>(size=5)";
  CHECK(registry().policy("uniform/chunks<chunks<position(sinks=2,protect=full)>(size=3)>(size=5)").specification() ==
        nested);
  CHECK(registry().policy(nested).specification() == nested);
  // What it does not say itself comes from what it wraps.
  const AnyScorer scorer = registry().policy("uniform/chunks<random(sinks=7)>(size=2)").scorer;
  CHECK(scorer.needs == Needs::positions);
  CHECK(scorer.protection().sinks == 7);
  CHECK_FALSE(scorer.heads_comparable);
}

TEST_CASE("an erased wrapper scores as the type does") {
  const std::vector<float> keys{1, 2, 3, 4, 5, 6};
  const std::vector<index_t> positions{0, 1, 2, 3, 4, 5};
  RaggedCache<float> cache({1, 1, 1, 1, 1});
  const Rows<const float> rows = dense_rows<const float>(keys.data(), 6, 1);
  cache.append(host_exec{}, 0, std::span(&rows, 1), std::span(&rows, 1), positions);
  const auto layer = observe_layer(cache, 0, 1.f);
  const LayerObservation<float> o = layer.observation();
  std::vector<float> erased(6), typed(6);
  score_on(host_exec{}, registry().policy("uniform/chunks<knorm>(size=4)").scorer, o, {erased.data(), 1, 6, 6});
  score_on(host_exec{}, score::Chunks<score::KNorm>{{}, 4}, o, {typed.data(), 1, 6, 6});
  CHECK(typed == std::vector<float>{-2.5f, -2.5f, -2.5f, -2.5f, -5.5f, -5.5f});
  CHECK(erased == typed);
}

TEST_CASE("nesting that makes no sense is refused, saying why") {
  CHECK(error_of("uniform/knorm<position>") == "scorer knorm wraps no scorer; 'position' was given");
  CHECK(error_of("uniform/chunks<uniform>").find("unknown scorer 'uniform'; it is an allocator") == 0);
  CHECK(error_of("uniform/chunks<norm>").find("unknown scorer 'norm'; nearest known: knorm") == 0);
  CHECK(error_of("chunks<knorm>").find("it is a scorer: uniform/chunks<knorm>") != std::string::npos);
  CHECK(error_of("pyramid<uniform>").find("it is an allocator: pyramid<uniform>/snapkv") != std::string::npos);
  CHECK(error_of("chunks<knorm>/knorm").find("unknown allocator 'chunks'; it is a scorer") == 0);
  CHECK(error_of("uniform/chunks<knorm").find("expected '>' at column 21") != std::string::npos);
  CHECK(error_of("uniform/chunks<>").find("expected a name at column 16") != std::string::npos);
  CHECK(error_of("uniform/chunks<knorm>(size=0)") == "");  // seen when it scores, as every value of a parameter
}

TEST_CASE("depth is limited: a text of any length is an error or a policy, never a crash") {
  const auto nested = [](int depth) {
    std::string text = "uniform/";
    for (int i = 1; i < depth; ++i) text += "chunks<";
    text += "knorm";
    for (int i = 1; i < depth; ++i) text += '>';
    return text;
  };
  CHECK(error_of(nested(max_nesting)) == "");
  CHECK(error_of(nested(max_nesting + 1)).find("more than 8 parts stand inside each other at column 64") !=
        std::string::npos);
  for (const std::string& text : {nested(25000), nested(25000).substr(8), nested(25000).substr(0, 100000)}) {
    CHECK(error_of(text).find("more than 8 parts") != std::string::npos);
    CHECK(error_of(text).size() < 400);
  }
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
