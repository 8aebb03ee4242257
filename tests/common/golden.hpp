// Golden values: results of existing implementations, or of an independent float64 program, for named inputs. Reads
// tests/golden/index.json and the tensors that it names, and holds the rule by which our results are compared.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/observe/observation.hpp"

#if !defined(KVEVICT_TEST_DATA) || !defined(KVEVICT_SOURCE_DIR)
#error "KVEVICT_TEST_DATA (tests/golden) and KVEVICT_SOURCE_DIR (repository root) must be defined"
#endif

namespace kvevict::golden {

// Kept positions of all rows of a case, ascending in each row.
struct Kept {
  std::span<const std::int32_t> positions;
  std::span<const std::int32_t> offsets;  // [rows + 1]
  std::vector<index_t> counts;            // [rows]
  // Smallest relative gap between the last kept and the first evicted score: 0 = the tie rule decided, 1 = nothing was
  // evicted, NaN = not known.
  double margin = std::numeric_limits<double>::quiet_NaN();

  std::size_t rows() const { return counts.size(); }
  std::span<const std::int32_t> row(std::size_t r) const {
    const auto first = static_cast<std::size_t>(offsets[r]);
    return positions.subspan(first, static_cast<std::size_t>(offsets[r + 1]) - first);
  }
};

struct Case {
  std::string id, policy, source;
  nlohmann::json params, json;       // the parameters, and the whole entry
  std::string rows;                  // "kv_head" or "query_head"; empty without a score
  Matrix<const float> score;         // null data where the case has none; "past only" cases have t - window columns
  std::map<std::string, Kept> kept;  // by tag: "r0.50" keeps max(1, int(t * (1 - 0.50))) rows per head
  std::map<std::string, TensorView> extra;  // further tensors

  bool past_only() const { return params.contains("columns") && params["columns"].is_string(); }
};

// float32 inputs of a set. Sets from a dump have no q_pre and no w_o, and the recorded prompt queries only.
struct Inputs {
  std::vector<float> k, v, q, q_pre, w_o;  // [H,t,d] [H,t,d] [Hq,queries,d] [Hq,queries,d] [Hq,d,hidden]
  index_t queries = 0, hidden = 0;
  std::vector<index_t> q_positions, positions;  // [queries], [t]: 0, 1, ...
};

class Set {
 public:
  std::string name;
  index_t tokens = 0;
  CacheShape shape;  // of one layer
  double rope_theta = 0;
  float softmax_scale = 0;
  Inputs inputs;
  std::vector<float> inv_freq;  // [d/2]
  std::vector<Case> cases;

  // Throws format_error where there is no such case.
  const Case& at(std::string_view id) const {
    for (const auto& c : cases)
      if (c.id == id) return c;
    fail_format(name, ": no golden case '", id, "'");
  }
  // Cases whose id begins with `prefix`.
  std::vector<const Case*> starting_with(std::string_view prefix) const {
    std::vector<const Case*> out;
    for (const auto& c : cases)
      if (c.id.rfind(prefix, 0) == 0) out.push_back(&c);
    return out;
  }
  // The set as one layer; window queries are the newest `window` query rows. Valid while the set lives and stays.
  OwnedObservation<float> observe(index_t window) const {
    const index_t rows = std::min(window, inputs.queries), d = shape.head_dim_k;
    OwnedObservation<float> out;
    out.shape = shape;
    out.softmax_scale = softmax_scale;
    out.rope = {RopeStyle::half, d, inv_freq, 1.f};
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      out.keys.push_back(dense_rows(inputs.k.data() + std::ptrdiff_t{h} * tokens * d, tokens, d));
      out.values.push_back(dense_rows(inputs.v.data() + std::ptrdiff_t{h} * tokens * d, tokens, d));
      out.positions.emplace_back(inputs.positions);
    }
    for (index_t h = 0; h < shape.q_heads; ++h)
      out.window_queries.push_back(
          dense_rows(inputs.q.data() + (std::ptrdiff_t{h} * inputs.queries + inputs.queries - rows) * d, rows, d));
    out.window_positions = std::span(inputs.q_positions).last(static_cast<std::size_t>(rows));
    return out;
  }

  std::shared_ptr<const Safetensors> expected;  // what the cases' tensors point into
};

namespace detail {
inline std::filesystem::path data(const std::string& file) { return std::filesystem::path(KVEVICT_TEST_DATA) / file; }

inline nlohmann::json read_json(const std::string& file) {
  const MappedFile mapped(data(file));
  return nlohmann::json::parse(mapped.bytes().begin(), mapped.bytes().end());
}

inline std::vector<float> floats(const Safetensors& file, const std::string& name) {
  const auto all = file.at(name).as<float>();
  return {all.begin(), all.end()};
}

// The first `most` rows of every head, widened.
inline std::vector<float> widened(const TensorView& tensor, index_t most) {
  const auto all = tensor.as<fp16_t>();
  const auto rows = static_cast<std::size_t>(tensor.shape[1]), d = static_cast<std::size_t>(tensor.shape[2]);
  std::vector<float> out;
  for (std::size_t h = 0; h < static_cast<std::size_t>(tensor.shape[0]); ++h)
    for (const fp16_t x : all.subspan(h * rows * d, static_cast<std::size_t>(most) * d)) out.push_back(to_float(x));
  return out;
}

inline Inputs read_inputs(const nlohmann::json& entry, index_t tokens) {
  Inputs out;
  out.positions.resize(static_cast<std::size_t>(tokens));
  std::iota(out.positions.begin(), out.positions.end(), 0);
  if (entry.contains("file")) {
    const Safetensors file(data(entry["file"]));
    out.k = floats(file, "k");
    out.v = floats(file, "v");
    out.q = floats(file, "q");
    out.q_pre = floats(file, "q_pre");
    out.w_o = floats(file, "w_o");
    out.queries = tokens;
    out.hidden = static_cast<index_t>(file.at("w_o").shape[2]);
    out.q_positions = out.positions;
  } else {
    const Safetensors file(std::filesystem::path(KVEVICT_SOURCE_DIR) / "examples/data" / entry["dump"]);
    const std::string layer = "layers." + std::to_string(entry["layer"].get<int>());
    for (const auto p : file.at("q_positions").as<std::int32_t>())
      if (p < tokens) out.q_positions.push_back(p);
    out.queries = static_cast<index_t>(out.q_positions.size());
    out.k = widened(file.at(layer + ".k"), tokens);
    out.v = widened(file.at(layer + ".v"), tokens);
    out.q = widened(file.at(layer + ".q"), out.queries);
  }
  return out;
}

inline Case read_case(const nlohmann::json& entry, const Safetensors& expected) {
  Case out;
  out.json = entry;
  out.id = entry["id"];
  out.policy = entry["policy"];
  out.source = entry["source"];
  out.params = entry["params"];
  out.rows = entry.value("rows", "");
  if (entry.contains("score")) {
    const auto& tensor = expected.at(entry["score"].get<std::string>());
    const auto cols = static_cast<index_t>(tensor.shape[1]);
    out.score = {tensor.as<float>().data(), static_cast<index_t>(tensor.shape[0]), cols, cols};
  }
  if (entry.contains("kept"))
    for (const auto& [tag, kept] : entry["kept"].items()) {
      auto& k = out.kept[tag];
      k.positions = expected.at(kept["tensor"].get<std::string>()).as<std::int32_t>();
      k.offsets = expected.at(kept["offsets"].get<std::string>()).as<std::int32_t>();
      k.counts = kept["counts"].get<std::vector<index_t>>();
      k.margin = kept.value("margin", std::numeric_limits<double>::quiet_NaN());
    }
  if (entry.contains("extra"))
    for (const auto& [tag, tensor] : entry["extra"].items()) out.extra[tag] = expected.at(tensor.get<std::string>());
  return out;
}
}  // namespace detail

// Names of all sets: smollm2-512-l00, smollm2-512-l14, synthetic-s01, synthetic-s02, smollm2-512-dump-l03, -l21.
inline std::vector<std::string> set_names() {
  const auto index = detail::read_json("index.json");
  std::vector<std::string> out;
  for (const auto& entry : index.at("sets")) out.push_back(entry["name"]);
  return out;
}

inline Set load(std::string_view name) {
  const auto index = detail::read_json("index.json");
  for (const auto& entry : index.at("sets")) {
    if (entry["name"] != name) continue;
    Set out;
    out.name = name;
    out.tokens = entry["t"];
    out.shape = {1, entry["n_kv_heads"], entry["n_q_heads"], entry["head_dim"], entry["head_dim"]};
    out.rope_theta = entry["rope_theta"];
    out.softmax_scale = static_cast<float>(entry["softmax_scale"].get<double>());
    for (index_t i = 0; i < out.shape.head_dim_k / 2; ++i)
      out.inv_freq.push_back(static_cast<float>(std::pow(out.rope_theta, -2.0 * i / out.shape.head_dim_k)));
    out.inputs = detail::read_inputs(entry["inputs"], out.tokens);
    out.expected = std::make_shared<const Safetensors>(detail::data(entry["expected"]));
    for (const auto& c : entry["cases"]) out.cases.push_back(detail::read_case(c, *out.expected));
    return out;
  }
  fail_format("no golden set '", name, "'");
}

// tests/golden/tables.json: budgets, rounding, pooling edges and other small numeric pieces.
inline nlohmann::json tables() { return detail::read_json("tables.json"); }

// ---- comparing: an empty text where all is well, else what differs first; made for CHECK(mismatch(...) == "") ----

// |got - want| <= 1e-5 |want| + 1e-7 M, M = largest |want| over the columns that are not protected. `is_protected(row,
// column)`. `got` may have more columns than `want` (a window that the case does not score).
template <class IsProtected>
std::string score_mismatch(Matrix<const float> got, Matrix<const float> want, IsProtected is_protected) {
  if (want.data == nullptr) return "the case has no score";
  if (got.rows != want.rows || got.cols < want.cols)
    return joined_text("shape [", got.rows, ", ", got.cols, "] for [", want.rows, ", ", want.cols, "]");
  double largest = 0;
  for (index_t r = 0; r < want.rows; ++r)
    for (index_t c = 0; c < want.cols; ++c)
      if (!is_protected(r, c) && std::isfinite(want.at(r, c)))
        largest = std::max(largest, std::abs(static_cast<double>(want.at(r, c))));
  for (index_t r = 0; r < want.rows; ++r)
    for (index_t c = 0; c < want.cols; ++c) {
      const double g = got.at(r, c), w = want.at(r, c);
      if (g == w) continue;  // infinities
      if (!(std::abs(g - w) <= 1e-5 * std::abs(w) + 1e-7 * largest))
        return joined_text("row ", r, " column ", c, ": got ", g, ", want ", w, " (M = ", largest, ")");
    }
  return "";
}
inline std::string score_mismatch(Matrix<const float> got, Matrix<const float> want) {
  return score_mismatch(got, want, [](index_t, index_t) { return false; });
}

// `got(row)` gives the kept positions of a row. Equal sets are required where the margin is above 1e-5 or where
// `structural` says that ties are exact in any arithmetic (plateaus of max pooling, constant scores); else positions
// may differ whose score lies within 1e-5 of the lowest kept one of the row. Positions without a score must agree.
template <class GotRow>
std::string kept_mismatch(const Kept& want, GotRow got, Matrix<const float> score = {}, bool structural = false) {
  const bool strict = structural || !(want.margin <= 1e-5) || score.data == nullptr;
  std::size_t total = 0;
  for (std::size_t r = 0; r < want.rows(); ++r) {
    const auto w = want.row(r);
    const auto g = got(r);
    total += g.size();
    if (std::equal(w.begin(), w.end(), g.begin(), g.end())) continue;
    std::vector<index_t> differ;
    std::set_symmetric_difference(w.begin(), w.end(), g.begin(), g.end(), std::back_inserter(differ));
    if (differ.empty()) return joined_text("row ", r, ": positions are not ascending and unique");
    if (strict)
      return joined_text("row ", r, ": ", differ.size(), " positions differ, first ", differ[0], " (", g.size(),
                         " kept, want ", w.size(), ", margin ", want.margin, ")");
    const auto row = static_cast<index_t>(r);
    double cut = std::numeric_limits<double>::infinity();
    for (const auto p : w)
      if (p < score.cols) cut = std::min(cut, static_cast<double>(score.at(row, p)));
    for (const auto p : differ)
      if (p >= score.cols || !(std::abs(score.at(row, p) - cut) <= 1e-5 * std::abs(cut)))
        return joined_text("row ", r, ": position ", p, " differs and is not at the cut ", cut);
  }
  if (total != want.positions.size()) return joined_text(total, " rows kept, want ", want.positions.size());
  return "";
}
// The same for a plan's CSR arrays of one layer.
template <class Offset>
std::string kept_mismatch(const Kept& want, std::span<const Offset> offsets, std::span<const index_t> rows,
                          Matrix<const float> score = {}, bool structural = false) {
  if (offsets.size() != want.rows() + 1) return joined_text(offsets.size(), " offsets, want ", want.rows() + 1);
  return kept_mismatch(
      want,
      [&](std::size_t r) {
        const auto first = static_cast<std::size_t>(offsets[r]);
        return rows.subspan(first, static_cast<std::size_t>(offsets[r + 1]) - first);
      },
      score, structural);
}

}  // namespace kvevict::golden
