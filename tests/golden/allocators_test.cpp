// Golden parity of the allocators: rounding tables, both pyramids, and Ada-KV in the variants of kvpress and of the
// published code.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "common/golden.hpp"
#include "common/sharing.hpp"
#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/apportion.hpp"
#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/score/snapkv.hpp"

using namespace kvevict;

namespace {

const nlohmann::json& tables() {
  static const nlohmann::json all = golden::tables();
  return all;
}

// Rows per layer of one head each, for a budget of `mean` rows or a ratio.
template <class A>
std::vector<std::int64_t> layers_of(const A& allocator, index_t layers, index_t tokens, GrantedBudget budget,
                                    Audit& audit) {
  const std::vector<index_t> held(static_cast<std::size_t>(layers), tokens);
  std::vector<index_t> out(held.size());
  budget.full = std::int64_t{layers} * tokens;
  budget.total = std::min(budget.total, budget.full);
  allocator.allocate({layers, 1, 1, 1, 1}, held, budget, {out.data(), layers, 1, 1}, audit);
  return {out.begin(), out.end()};
}

bool says(const Audit& audit, const std::string& what) {
  return std::any_of(audit.entries().begin(), audit.entries().end(),
                     [&](const std::string& e) { return e.find(what) != std::string::npos; });
}

}  // namespace

TEST_CASE("halves and largest remainders equal the tables") {
  for (const auto& e : tables()["round_half_even"]) CHECK(round_half_even(e["x"]) == e["y"].get<std::int64_t>());
  for (const auto& e : tables()["largest_remainder"])
    CHECK(largest_remainder(e["weights"].get<std::vector<double>>(), e["total"].get<std::int64_t>()) ==
          e["shares"].get<std::vector<std::int64_t>>());
}

TEST_CASE("uniform with rounding=kvpress keeps what kvpress keeps") {
  for (const auto& e : tables()["n_kept"]) {
    CAPTURE(e.dump());
    Audit audit;
    GrantedBudget budget;
    budget.retain = 1.0 - e["r"].get<double>();
    const auto rows = layers_of(allocate::Uniform{false, UniformRounding::kvpress}, 1, e["t"], budget, audit);
    CHECK(rows[0] == e["kvpress"].get<std::int64_t>());
  }
}

TEST_CASE("pyramid with rounding=kvpress equals kvpress, fallbacks included") {
  for (const auto& e : tables()["pyramid_kvpress"]) {
    CAPTURE(e.dump());
    Audit audit;
    GrantedBudget budget;
    budget.retain = 1.0 - e["r"].get<double>();
    const allocate::Pyramid pyramid{e["beta"], PyramidRounding::kvpress, e["window"]};
    CHECK(layers_of(pyramid, e["layers"], e["t"], budget, audit) == e["budgets"].get<std::vector<std::int64_t>>());
    CHECK(says(audit, "fell back to uniform") == e["fallback"].get<bool>());
  }
}

TEST_CASE("pyramid with rounding=reference equals the published code") {
  for (const auto& e : tables()["pyramid_reference"]) {
    CAPTURE(e.dump());
    const index_t layers = e["layers"], window = e["window"], tokens = e["t"], capacity = e["capacity"];
    Audit audit;
    const auto rows = layers_of(allocate::Pyramid{e["beta"], PyramidRounding::reference, window}, layers, tokens,
                                {std::int64_t{layers} * capacity}, audit);
    if (e["past_budgets"].is_null()) {
      CHECK(rows == std::vector<std::int64_t>(rows.size(), tokens));
      continue;
    }
    auto want = e["past_budgets"].get<std::vector<std::int64_t>>();
    for (auto& w : want) w += window;
    CHECK(rows == want);
  }
}

TEST_CASE("ada with variant=reference interpolates as the published code") {
  for (const auto& e : tables()["ada_interpolation"]) {
    CAPTURE(e.dump());
    // Heads with counts[h] high scores each, all of them within the best heads * b.
    const auto counts = e["counts"].get<std::vector<index_t>>();
    const auto heads = static_cast<index_t>(counts.size());
    const index_t tokens = *std::max_element(counts.begin(), counts.end()) + e["b"].get<index_t>();
    std::vector<float> scores(static_cast<std::size_t>(heads * tokens), 0.f);
    for (std::size_t h = 0; h < counts.size(); ++h)
      std::fill_n(scores.begin() + static_cast<std::ptrdiff_t>(h) * tokens, counts[h], 1.f);
    const tests::Sharing layer(0, std::vector<index_t>(counts.size(), tokens), {});
    const allocate::Ada<> ada{.floor = e["alpha"], .variant = AdaVariant::reference};
    Audit audit;
    const auto out = layer.rows(ada, {scores.data(), heads, tokens, tokens},
                                std::int64_t{heads} * e["b"].get<std::int64_t>(), audit);
    // A head keeps one row at least, where the reference may leave it none besides the window.
    auto want = e["budgets"].get<std::vector<index_t>>();
    for (auto& w : want) w = std::max(w, 1);
    CHECK(out == want);
  }
}

namespace {

// One golden Ada-KV case as a layer of scores: the stored ones, or our own.
struct AdaLayer {
  std::vector<float> scores;
  tests::Sharing sharing;
  Matrix<const float> matrix;
  AdaLayer(const golden::Set& set, const score::SnapKV& scorer, const Matrix<const float>* stored)
      : sharing(0, std::vector<index_t>(static_cast<std::size_t>(set.shape.kv_heads), set.tokens),
                scorer.protection()) {
    const index_t heads = set.shape.kv_heads, t = set.tokens;
    scores.assign(static_cast<std::size_t>(heads * t), -std::numeric_limits<float>::infinity());
    const Matrix<float> own{scores.data(), heads, t, t};
    matrix = own;
    const auto observed = set.observe(scorer.window);
    if (stored)
      for (index_t h = 0; h < heads; ++h) std::copy_n(stored->row(h), stored->cols, own.row(h));
    else score_on(host_exec{2}, scorer, observed.observation(), own);
  }

  // Rows per head, and what the selector keeps.
  std::vector<index_t> rows;
  std::vector<std::vector<index_t>> kept;
  void run(const allocate::Ada<>& ada, std::int64_t total) {
    Audit audit;
    kept.clear();
    rows = sharing.rows(ada, matrix, total, audit);
    std::vector<std::byte> scratch(select_scratch_bytes(TopK{}, matrix.cols));
    for (std::size_t h = 0; h < rows.size(); ++h) {
      auto& out = kept.emplace_back(static_cast<std::size_t>(rows[h]));
      select_row(TopK{}, {matrix.row(static_cast<index_t>(h)), static_cast<std::size_t>(matrix.cols)}, rows[h],
                 sharing.protection(ada, total, h), out, scratch);
    }
  }
  auto by_row() const {
    return [this](std::size_t r) { return kept[r]; };
  }
};

double retain_of(const std::string& tag) { return 1.0 - std::stod(tag.substr(1)); }

}  // namespace

TEST_CASE("ada with variant=kvpress keeps what kvpress keeps, from stored scores and from our own") {
  for (const std::string& name : golden::set_names()) {
    const golden::Set set = golden::load(name);
    for (const golden::Case* wanted : set.starting_with("adakv_kvpress.")) {
      CAPTURE(name);
      CAPTURE(wanted->id);
      score::SnapKV scorer;
      scorer.window = std::stoi(wanted->id.substr(wanted->id.find("_w") + 2));
      scorer.pool = Pooling::avg(5);
      scorer.order = PoolOrder::pool_then_group;
      scorer.protect = ProtectShare::score;
      const allocate::Ada<> ada{.floor = wanted->params["alpha"], .variant = AdaVariant::kvpress};
      for (const auto& entry : wanted->kept) {
        const std::string& tag = entry.first;
        const golden::Kept& kept = entry.second;
        CAPTURE(tag);
        Audit audit;
        const std::vector<index_t> tokens(static_cast<std::size_t>(set.shape.kv_heads), set.tokens);
        std::vector<std::int64_t> totals(1);
        GrantedBudget budget{1, std::int64_t{set.shape.kv_heads} * set.tokens, retain_of(tag)};
        ada.layer_totals(set.shape, tokens, budget, totals, audit);

        AdaLayer stored(set, scorer, &wanted->score);
        stored.run(ada, totals[0]);
        CHECK(stored.rows == kept.counts);
        CHECK(golden::kept_mismatch(kept, stored.by_row(), wanted->score, true) == "");

        AdaLayer own(set, scorer, nullptr);
        const index_t past = set.tokens - scorer.window;
        CHECK(golden::score_mismatch(own.matrix, wanted->score, [past](index_t, index_t c) { return c >= past; }) ==
              "");
        own.run(ada, totals[0]);
        if (kept.margin > 1e-5) CHECK(golden::kept_mismatch(kept, own.by_row(), wanted->score) == "");
      }
    }
  }
}

TEST_CASE("ada with variant=reference gives the budgets of the published code, raw and weighed") {
  for (const std::string& name : golden::set_names()) {
    const golden::Set set = golden::load(name);
    for (const golden::Case* wanted : set.starting_with("adakv_ref.")) {
      CAPTURE(name);
      CAPTURE(wanted->id);
      score::SnapKV scorer;
      scorer.window = wanted->params["window"];
      const auto kernel = wanted->params["kernel"].get<index_t>();
      scorer.pool = wanted->params["pool"] == "max" ? Pooling::max(kernel) : Pooling::avg(kernel);
      scorer.group = wanted->params["group"] == "max" ? GroupReduction::max : GroupReduction::mean;
      scorer.protect = ProtectShare::full;
      const allocate::Ada<> ada{.floor = wanted->params["alpha"],
                                .variant = AdaVariant::reference,
                                .concentration = wanted->params["normalize"].get<bool>()};
      const AdaLayer own(set, scorer, nullptr);
      CHECK(golden::score_mismatch(own.matrix, wanted->score) == "");
      for (const auto& entry : wanted->kept) {
        const std::string& tag = entry.first;
        const golden::Kept& kept = entry.second;
        CAPTURE(tag);
        AdaLayer stored(set, scorer, &wanted->score);
        stored.run(ada, std::int64_t{set.shape.kv_heads} * rows_as_kvpress(set.tokens, retain_of(tag)));
        const auto budgets = wanted->extra.at("budgets." + tag).as<std::int32_t>();
        for (std::size_t h = 0; h < stored.rows.size(); ++h) CHECK(stored.rows[h] - scorer.window == budgets[h]);
        CHECK(golden::kept_mismatch(kept, stored.by_row(), wanted->score, true) == "");
      }
    }
  }
}
