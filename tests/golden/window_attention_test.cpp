// Window attention against stored results of existing codes: scores, and the kept sets that follow from them.
#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "common/golden.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cpu/topk.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/score/snapkv.hpp"

namespace {
using namespace kvevict;

score::SnapKV scorer_of(const golden::Case& c) {
  score::SnapKV s;
  if (c.params.contains("base")) {  // Ada-KV over the scores of kvpress: "snapkv_kvpress(window=32,kernel=5)"
    const std::string base = c.params["base"];
    s.window = std::stoi(base.substr(base.find("window=") + 7));
    s.pool = Pooling::avg(std::stoi(base.substr(base.find("kernel=") + 7)));
    s.order = PoolOrder::pool_then_group;
    s.protect = ProtectShare::score;
    return s;
  }
  s.window = c.params["window"];
  const index_t kernel = c.params["kernel"];
  const std::string pool = c.params.value("pool", c.id.find("max7") != std::string::npos ? "max" : "avg");
  s.pool = pool == "none" ? Pooling::none() : pool == "avg" ? Pooling::avg(kernel) : Pooling::max(kernel);
  REQUIRE(parse_value(c.params["rows"].get<std::string>(), s.rows));
  REQUIRE(parse_value(c.params["group"].get<std::string>(), s.group));
  s.order = c.params["order"] == "pool_then_group" ? PoolOrder::pool_then_group : PoolOrder::group_then_pool;
  s.protect = c.params.value("protect", "") == "by_score" ? ProtectShare::score : ProtectShare::half;
  return s;
}

// Rows kept by top-k over the scored columns, with the window behind them where the case keeps it outside the scores.
std::vector<index_t> kept_row(const golden::Case& c, std::span<const float> scores, index_t tokens, index_t keep) {
  const index_t columns = c.past_only() ? c.score.cols : tokens, window = tokens - columns;
  std::vector<index_t> out(static_cast<std::size_t>(keep));
  std::vector<std::byte> scratch(topk_scratch_bytes(columns));
  topk(scores.first(static_cast<std::size_t>(columns)), keep - window,
       std::span(out).first(static_cast<std::size_t>(keep - window)), scratch);
  for (index_t i = 0; i < window; ++i) out[static_cast<std::size_t>(keep - window + i)] = columns + i;
  return out;
}

TEST_CASE("golden: window attention gives the stored scores and kept sets, in one pass and in two") {
  int cases = 0;
  for (const auto& set_name : golden::set_names()) {
    const auto set = golden::load(set_name);
    for (const auto& c : set.cases) {
      if (c.id.rfind("snapkv_", 0) != 0 && c.id.rfind("adakv_", 0) != 0) continue;
      score::SnapKV scorer = scorer_of(c);
      CAPTURE(set_name);
      CAPTURE(c.id);
      CAPTURE(specification(scorer));
      const auto layer = set.observe(scorer.window);
      const index_t heads = scorer.score_heads(set.shape);
      std::vector<float> scores(static_cast<std::size_t>(heads) * static_cast<std::size_t>(set.tokens));
      const Matrix<float> out{scores.data(), heads, set.tokens, set.tokens};
      const bool by_score = scorer.protect == ProtectShare::score;
      for (const std::int64_t limit : {0, 1}) {
        scorer.scratch_limit = limit;
        score_on(host_exec{}, scorer, layer.observation(), out);
        CHECK(golden::score_mismatch(out, c.score, [&](index_t, index_t column) {
                return by_score && column >= set.tokens - scorer.window;
              }) == "");
      }
      ++cases;
      if (c.policy != "SnapKV") continue;  // the rows of Ada-KV are the allocator's
      for (const auto& entry : c.kept) {   // clang 14 captures no structured bindings
        const auto& kept = entry.second;
        CAPTURE(entry.first);
        CHECK(golden::kept_mismatch(
                  kept,
                  [&](std::size_t r) {
                    return kept_row(c, {out.row(static_cast<index_t>(r)), static_cast<std::size_t>(set.tokens)},
                                    set.tokens, kept.counts[r]);
                  },
                  c.score, scorer.pool.kind == Pooling::Kind::max) == "");
      }
    }
  }
  CHECK(cases == 6 * 22);
}

}  // namespace
