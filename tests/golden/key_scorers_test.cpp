// Golden parity of the scorers that look at keys and positions alone, and of re-rotated keys.
#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "common/golden.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/rope/rope_ops.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/position.hpp"

using namespace kvevict;

namespace {

// Scores of one layer, and what uniform selection keeps of them.
struct Scored {
  std::vector<float> values;
  Matrix<const float> matrix;
  std::vector<std::vector<index_t>> kept;
};

template <class S>
Scored run(const S& scorer, const golden::Set& set) {
  Scored out;
  const index_t heads = set.shape.kv_heads;
  out.values.assign(static_cast<std::size_t>(heads * set.tokens), -7.f);
  const auto layer = set.observe(set.tokens);
  const Matrix<float> matrix{out.values.data(), heads, set.tokens, set.tokens};
  score_on(host_exec{2}, scorer, layer.observation(), matrix);
  out.matrix = matrix;
  return out;
}

// kept(row) of the comparison: `counts[row]` rows by the selector.
auto selected(const Scored& scored, const golden::Kept& want, Protect protect) {
  return [&scored, &want, protect](std::size_t r) {
    const std::span<const float> row(scored.matrix.row(static_cast<index_t>(r)),
                                     static_cast<std::size_t>(scored.matrix.cols));
    std::vector<index_t> out(static_cast<std::size_t>(want.counts[r]));
    std::vector<std::byte> scratch(select_scratch_bytes(TopK{}, scored.matrix.cols));
    select_row(TopK{}, row, want.counts[r], protect_asked(protect, static_cast<index_t>(row.size())), out, scratch);
    return out;
  };
}

}  // namespace

TEST_CASE("knorm and keydiff equal kvpress, scores and kept sets") {
  for (const std::string& name : golden::set_names()) {
    CAPTURE(name);
    const golden::Set set = golden::load(name);
    const auto check = [&](const auto& scorer, const golden::Case& wanted) {
      CAPTURE(wanted.id);
      const Scored got = run(scorer, set);
      CHECK(golden::score_mismatch(got.matrix, wanted.score) == "");
      for (const auto& [tag, kept] : wanted.kept)
        CHECK(golden::kept_mismatch(kept, selected(got, kept, scorer.protection()), wanted.score) == "");
    };
    check(score::KNorm{}, set.at("knorm"));
    check(score::KeyDiff{}, set.at("keydiff"));
  }
}

TEST_CASE("position with protect=full keeps the rows of kvpress' StreamingLLM") {
  for (const std::string& name : golden::set_names()) {
    CAPTURE(name);
    const golden::Set set = golden::load(name);
    const score::Position scorer{{.sinks = 4, .protect = ProtectShare::full}};
    const Scored got = run(scorer, set);
    for (const auto& [tag, kept] : set.at("streaming").kept)
      CHECK(golden::kept_mismatch(kept, selected(got, kept, scorer.protection())) == "");
  }
}

TEST_CASE("kept keys moved to positions 0, 1, ... equal kvpress' re-rotated keys") {
  for (const std::string name : {"synthetic-s01", "synthetic-s02"}) {
    CAPTURE(name);
    const golden::Set set = golden::load(name);
    const auto layer = set.observe(1);
    const auto& knorm = set.at("knorm").kept.at("r0.50");
    const auto want = set.expected->at("keyrerotation.knorm.keys").as<float>();
    const auto d = static_cast<std::size_t>(set.shape.head_dim_k), kept = want.size() / d / knorm.rows();
    std::vector<index_t> to(kept);
    std::iota(to.begin(), to.end(), 0);
    for (std::size_t h = 0; h < knorm.rows(); ++h) {
      const auto from = knorm.row(h);
      REQUIRE(from.size() == kept);
      std::vector<float> rows;
      for (const auto p : from)
        for (std::size_t c = 0; c < d; ++c) rows.push_back(layer.keys[h].at(p, static_cast<std::int64_t>(c)));
      shift(layer.rope, dense_rows(rows.data(), static_cast<std::int64_t>(kept), set.shape.head_dim_k), from, to);
      for (std::size_t i = 0; i < rows.size(); ++i)
        CHECK(rows[i] == doctest::Approx(want[h * kept * d + i]).epsilon(1e-5).scale(1));
    }
  }
}
