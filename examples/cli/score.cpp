// kvevict score: what a scorer says of every token.
#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/files.hpp"
#include "cli/missing_input.hpp"
#include "cli/table.hpp"
#include "kvevict/core/printable.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/scores_file.hpp"

namespace kvevict::tool {

void score(const Common& common, const ScoreOptions& options) {
  const AnyPolicy policy = common.registry->policy(options.policy);
  const std::string path = options.dump.empty() ? shipped_data("smollm2-512").string() : options.dump;
  std::vector<std::string> inputs = policy_paths({{options.policy, policy}});
  inputs.push_back(path);
  check_outputs({{"--out", common.out}}, inputs);
  ScoresWriter file(policy.scorer.specification(), printable(path));
  index_t heads = 0, tokens = 0;
  std::vector<std::vector<float>> layers;
  visit_dump(
      path,
      [&]<CacheElement T>(const Dump<T>& dump) {
        heads = score_heads(policy.scorer, dump.info().shape);
        tokens = dump.info().prompt_len;
        const Observations<T> observations = observe_all(dump);
        for (const auto& o : observations.layers())
          naming_file(dump, policy.scorer, [&] {
            check_inputs(policy.scorer.specification(), policy.scorer.needs, policy.scorer.window_rows(), o);
            auto& out = layers.emplace_back(static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens));
            const Matrix<float> matrix{out.data(), heads, tokens, tokens};
            score_on(common.exec(), policy.scorer, o, matrix);
            for (index_t h = 0; h < heads; ++h)
              for (index_t t = 0; t < tokens; ++t)
                if (std::isnan(matrix.at(h, t)))
                  fail_domain(policy.scorer.specification(), ": the score of layer ", o.layer, ", head ", h, ", token ",
                              t, " is NaN");
            file.add(matrix);
          });
      },
      common.read_mode());
  if (!common.out.empty()) file.write(common.out);

  auto rows = nlohmann::ordered_json::array();
  for (std::size_t l = 0; l < layers.size(); ++l) {
    double least = std::numeric_limits<double>::infinity(), most = -least, sum = 0;
    std::int64_t scored = 0;
    for (const float s : layers[l])
      if (std::isfinite(s)) {
        least = std::min(least, double{s});
        most = std::max(most, double{s});
        sum += s;
        ++scored;
      }
    if (scored == 0) least = most = 0;
    rows.push_back({{"layer", l},
                    {"heads", heads},
                    {"tokens", tokens},
                    {"scored", scored},
                    {"least", least},
                    {"mean", scored ? sum / static_cast<double>(scored) : 0.0},
                    {"most", most}});
  }
  Common summary = common;
  summary.out.clear();
  if (common.format == "json") {
    deliver(summary, json_text({{"format", "kvevict-score"},
                                {"version", 1},
                                {"dump", path},
                                {"spec", policy.scorer.specification()},
                                {"rows", rows}}));
  } else if (common.format == "csv") {
    deliver(summary, as_csv(rows));
  } else {
    Table table({{"layer", true},
                 {"heads", true},
                 {"tokens", true},
                 {"scored", true},
                 {"least", true},
                 {"mean", true},
                 {"most", true}});
    const auto number = [](const nlohmann::ordered_json& v) { return joined_text(v.get<double>()); };
    for (const auto& r : rows)
      table.add({r["layer"].dump(), r["heads"].dump(), r["tokens"].dump(), r["scored"].dump(), number(r["least"]),
                 number(r["mean"]), number(r["most"])});
    deliver(summary, printable(policy.scorer.specification() + " on " + path) + '\n' + table.str());
  }
}

}  // namespace kvevict::tool
