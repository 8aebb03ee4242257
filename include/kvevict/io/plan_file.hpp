// Eviction plans as files: `kvevict-plan`, version 1 (docs/file-formats.md).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/json.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/plan/plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

// `dump`: what the plan was made for, kept as a remark. Throws std::system_error where the file cannot be written.
inline void write_plan(const std::filesystem::path& path, const EvictionPlan& plan, const std::string& dump = "") {
  SafetensorsWriter file;
  file.metadata("format", "kvevict-plan");
  file.metadata("version", "1");
  file.metadata("n_layers", std::to_string(plan.layers));
  file.metadata("n_kv_heads", std::to_string(plan.heads));
  file.metadata("spec", plan.specification);
  file.metadata("budget", plan.asked);
  file.metadata("dump", dump);
  nlohmann::ordered_json audit;
  audit["granted_rows"] = plan.granted.total;
  audit["rows_full"] = plan.granted.full;
  if (plan.granted.is_ratio()) audit["retain"] = plan.granted.retain;
  audit["entries"] = plan.audit.entries();
  file.metadata("audit", audit.dump());

  const auto add = [&](const char* name, const auto& list) { file.add(name, {std::ssize(list)}, std::span(list)); };
  std::vector<index_t> from, into;
  std::vector<float> weight;
  add("offsets", plan.offsets);
  add("indices", plan.indices);
  if (!plan.merge_offsets.empty()) {
    for (const RowMerge& m : plan.merges) {
      from.push_back(m.from);
      into.push_back(m.into);
      weight.push_back(m.weight);
    }
    add("merge_offsets", plan.merge_offsets);
    add("merge_from", from);
    add("merge_into", into);
    add("merge_weight", weight);
  }
  file.write(path);
}

namespace detail {

// CSR offsets over all heads: from 0, never falling, up to `end`.
inline std::vector<std::int64_t> read_offsets(const TensorView& tensor, std::int64_t heads, std::size_t end) {
  require_shape(tensor, {heads + 1});
  const auto values = tensor.as<std::int64_t>();
  if (values.front() != 0) fail_format(tensor.where, ": entry 0 is ", values.front(), "; 0 is required");
  for (std::size_t i = 1; i < values.size(); ++i)
    if (values[i] < values[i - 1])
      fail_format(tensor.where, ": entry ", i, " is ", values[i], ", below the entry before, ", values[i - 1]);
  if (values.back() != static_cast<std::int64_t>(end))
    fail_format(tensor.where, ": the last entry is ", values.back(), "; ", end, ", the number of rows, is required");
  return {values.begin(), values.end()};
}

inline void read_merges(const Safetensors& file, EvictionPlan& plan) {
  const auto& from_tensor = file.at("merge_from");
  const auto& into_tensor = file.at("merge_into");
  const auto& weight_tensor = file.at("merge_weight");
  require_shape(from_tensor, {-1});
  const auto from = from_tensor.as<index_t>();
  require_shape(into_tensor, {std::ssize(from)});
  require_shape(weight_tensor, {std::ssize(from)});
  const auto into = into_tensor.as<index_t>();
  const auto weight = weight_tensor.as<float>();
  plan.merge_offsets = read_offsets(file.at("merge_offsets"), std::int64_t{plan.layers} * plan.heads, from.size());
  for (index_t l = 0; l < plan.layers; ++l)
    for (index_t h = 0; h < plan.heads; ++h) {
      const auto kept = plan.head(l, h);
      const auto keeps = [&](index_t row) { return std::binary_search(kept.begin(), kept.end(), row); };
      const auto at = static_cast<std::size_t>(l) * static_cast<std::size_t>(plan.heads) + static_cast<std::size_t>(h);
      for (auto i = plan.merge_offsets[at]; i < plan.merge_offsets[at + 1]; ++i) {
        const auto k = static_cast<std::size_t>(i);
        if (from[k] < 0 || keeps(from[k]))
          fail_format(from_tensor.where, ": entry ", i, ", layer ", l, " head ", h, ": row ", from[k],
                      " is not an evicted row");
        if (!keeps(into[k]))
          fail_format(into_tensor.where, ": entry ", i, ", layer ", l, " head ", h, ": row ", into[k],
                      " is not a kept row");
        if (!std::isfinite(weight[k]))
          fail_format(weight_tensor.where, ": entry ", i, " is ", weight[k], "; a finite number is required");
        plan.merges.push_back({h, from[k], into[k], weight[k]});
      }
    }
}

inline void read_audit(const Metadata& meta, const std::string& where, EvictionPlan& plan) {
  const auto audit = parse_json(meta.text("audit"), where + ": metadata 'audit'", 3);
  const auto field = [&](const char* key, bool fits) {
    if (!fits) meta.fail("audit", joined_text("field '", key, "' is missing or of another kind"));
  };
  field("{}", audit.is_object());
  for (const auto& [key, to] : {std::pair{"granted_rows", &plan.granted.total}, {"rows_full", &plan.granted.full}}) {
    field(key, audit.contains(key) && audit[key].is_number_unsigned() &&
                   audit[key].get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()});
    *to = audit[key].get<std::int64_t>();
  }
  if (audit.contains("retain")) {
    field("retain", audit["retain"].is_number());
    plan.granted.retain = audit["retain"].get<double>();
  }
  field("entries", audit.contains("entries") && audit["entries"].is_array());
  for (const auto& entry : audit["entries"]) {
    field("entries", entry.is_string());
    plan.audit.add(entry.get<std::string>());
  }
}

}  // namespace detail

// Reads and validates a plan. Throws format_error that names file and field. That rows exist can be checked only
// against a cache: see check_plan.
[[nodiscard]] inline EvictionPlan read_plan(const std::filesystem::path& path) {
  const Safetensors file(path);
  const Metadata meta(file);
  meta.require_format("kvevict-plan", "1");
  for (const auto& [name, tensor] : file.tensors())
    if (name != "offsets" && name != "indices" && name != "merge_offsets" && name != "merge_from" &&
        name != "merge_into" && name != "merge_weight")
      fail_format(tensor.where, ": is unknown in a kvevict-plan");

  EvictionPlan plan;
  plan.layers = meta.count("n_layers", 1);
  plan.heads = meta.count("n_kv_heads", 1);
  plan.specification = meta.text("spec");
  plan.asked = meta.text("budget");
  detail::read_audit(meta, file.name(), plan);

  const auto& tensor = file.at("indices");
  require_shape(tensor, {-1});
  const auto indices = tensor.as<index_t>();
  plan.indices.assign(indices.begin(), indices.end());
  plan.offsets = detail::read_offsets(file.at("offsets"), std::int64_t{plan.layers} * plan.heads, indices.size());
  for (index_t l = 0; l < plan.layers; ++l)
    for (index_t h = 0; h < plan.heads; ++h) {
      index_t before = -1;
      for (const index_t row : plan.head(l, h)) {
        if (row <= before)
          fail_format(tensor.where, ": layer ", l, " head ", h, ": row ", row, " after ", before,
                      "; rows from 0 on, each above the one before, are required");
        before = row;
      }
    }
  for (const char* name : {"merge_from", "merge_into", "merge_weight", "merge_offsets"})
    if (file.contains(name)) {
      detail::read_merges(file, plan);
      break;
    }
  return plan;
}

// Throws std::invalid_argument unless `plan` fits heads of these many rows, [layers * kv_heads].
inline void check_plan(const EvictionPlan& plan, const CacheShape& shape, std::span<const index_t> tokens) {
  if (plan.layers != shape.layers || plan.heads != shape.kv_heads)
    fail_argument("plan: ", plan.layers, " layers of ", plan.heads, " heads; the cache has ", shape.layers, " of ",
                  shape.kv_heads);
  if (static_cast<std::int64_t>(tokens.size()) != shape.heads_total())
    fail_argument("check_plan: ", tokens.size(), " token counts for ", shape.heads_total(), " heads");
  const auto check = [&](index_t l, index_t h, index_t row) {
    const index_t most = tokens[static_cast<std::size_t>(shape.at(l, h))];
    if (row >= most)
      fail_argument("plan: layer ", l, " head ", h, ": row ", row, "; the cache has ", most, " rows there");
  };
  for (index_t l = 0; l < plan.layers; ++l) {
    for (index_t h = 0; h < plan.heads; ++h)
      if (const auto kept = plan.head(l, h); !kept.empty()) check(l, h, kept.back());
    for (const RowMerge& m : plan.layer(l).merges) check(l, m.head, m.from);
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
