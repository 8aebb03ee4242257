// What a recording says about itself: the metadata and the shared tensors of a `kvevict-dump` (docs/file-formats.md).
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/rope/frequencies.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct DumpInfo {
  std::string model, description;
  CacheShape shape;
  index_t prompt_len = 0;
  float softmax_scale = 0.f;
  RopeStyle rope_style = RopeStyle::half;
  double rope_theta = 0;             // 0 where only the frequencies are known
  std::vector<float> rope_inv_freq;  // [rotary_dim / 2]; a writer may leave it empty and give rope_theta
  float rope_attention_factor = 1.f;
  index_t q_stats_first = 0;         // prompt token that q_mean and q_cov begin with
  std::vector<index_t> layers;       // numbers in the model, [shape.layers]; empty: all of them
  std::vector<index_t> token_ids;    // [tokens]
  std::vector<index_t> positions;    // [tokens], ascending
  std::vector<index_t> q_positions;  // positions of the last prompt rows recorded and of every continuation row

  index_t tokens() const noexcept { return static_cast<index_t>(positions.size()); }
  // Valid while this object lives and is not changed.
  Rope rope() const& {
    return {rope_style, static_cast<index_t>(2 * rope_inv_freq.size()), rope_inv_freq, rope_attention_factor};
  }
  Rope rope() const&& = delete;
};

// What is wrong with the shared fields taken together, or an empty text. Each field alone has been looked at.
inline std::string dump_info_problem(const DumpInfo& d) {
  const auto total = static_cast<std::int64_t>(d.positions.size());
  if (d.shape.q_heads % d.shape.kv_heads != 0)
    return joined_text("n_q_heads: ", d.shape.q_heads, " query heads do not divide evenly over ", d.shape.kv_heads,
                       " KV heads");
  if (d.prompt_len < 1 || d.prompt_len > total)
    return joined_text("prompt_len: ", d.prompt_len, "; 1 to ", total, ", the rows recorded, is legal");
  if (!d.layers.empty() && static_cast<std::int64_t>(d.layers.size()) != d.shape.layers)
    return joined_text("layers: ", d.layers.size(), " numbers; n_layers is ", d.shape.layers);
  if (d.q_stats_first >= d.prompt_len)
    return joined_text("q_stats_first: ", d.q_stats_first, "; below prompt_len, ", d.prompt_len, ", is legal");
  if (static_cast<std::int64_t>(d.token_ids.size()) != total)
    return joined_text("token_ids: ", d.token_ids.size(), " entries; positions has ", total);
  const auto rotary = 2 * static_cast<std::int64_t>(d.rope_inv_freq.size());
  if (rotary == 0 || rotary > d.shape.head_dim_k)
    return joined_text("rope_inv_freq: ", rotary / 2, " entries; 1 to head_dim / 2 = ", d.shape.head_dim_k / 2,
                       " are legal");
  for (const float f : d.rope_inv_freq)
    if (!std::isfinite(f) || f < 0) return joined_text("rope_inv_freq: ", f, " is not a finite number from 0 on");
  // The query rows are the newest rows without a gap, so their number says which.
  const auto queries = static_cast<std::int64_t>(d.q_positions.size());
  if (queries < 1 || queries < total - d.prompt_len || queries > total)
    return joined_text("q_positions: ", queries, " entries; every continuation row (", total - d.prompt_len,
                       ") and the last prompt rows, at least 1 and at most ", total, " in all, are required");
  for (std::int64_t i = 0; i < queries; ++i) {
    const auto got = d.q_positions[static_cast<std::size_t>(i)];
    const auto wanted = d.positions[static_cast<std::size_t>(total - queries + i)];
    if (got != wanted)
      return joined_text("q_positions: entry ", i, " is ", got, "; ", wanted,
                         " is required: the last prompt rows and every continuation row, ascending");
  }
  return "";
}

// Metadata of a dump, all of it. `dtype` and `description` only inform; everything else changes what is computed, and
// so would a field that is not known here, such as a soft cap of the logits or a sliding window.
inline constexpr std::array<std::string_view, 16> dump_metadata{
    "format",     "version",    "model",  "n_layers",      "n_q_heads",     "n_kv_heads", "head_dim",
    "prompt_len", "rope_style", "layers", "softmax_scale", "q_stats_first", "rope_theta", "rope_attention_factor",
    "dtype",      "description"};

// Reads and validates the shared fields. Throws format_error that names file and field.
[[nodiscard]] inline DumpInfo read_dump_info(const Safetensors& file) {
  const Metadata meta(file);
  meta.require_format("kvevict-dump", "1");
  for (const auto& [key, value] : file.metadata())
    if (std::find(dump_metadata.begin(), dump_metadata.end(), key) == dump_metadata.end())
      meta.fail(key,
                "is unknown in a kvevict-dump of version 1; what it says would be ignored, and results could be "
                "wrong. A remark belongs into 'description'");
  DumpInfo d;
  d.model = meta.text("model");
  d.description = meta.text_or("description", "");
  d.shape.layers = meta.count("n_layers", 1);
  d.shape.kv_heads = meta.count("n_kv_heads", 1);
  d.shape.q_heads = meta.count("n_q_heads", 1);
  d.shape.head_dim_k = d.shape.head_dim_v = meta.count("head_dim", 1);
  d.prompt_len = meta.count("prompt_len", 1);
  d.softmax_scale = static_cast<float>(meta.positive("softmax_scale"));
  d.rope_style = meta.word<RopeStyle>("rope_style");
  if (meta.contains("rope_attention_factor"))
    d.rope_attention_factor = static_cast<float>(meta.positive("rope_attention_factor"));
  d.q_stats_first = meta.count_or("q_stats_first", 0, 0);
  if (meta.contains("layers")) d.layers = meta.counts("layers");

  const bool frequencies = file.contains("rope_inv_freq");
  if (!frequencies || meta.contains("rope_theta")) d.rope_theta = meta.positive("rope_theta");
  if (frequencies) {
    const auto& tensor = file.at("rope_inv_freq");
    require_shape(tensor, {-1});
    const auto values = tensor.as<float>();
    d.rope_inv_freq.assign(values.begin(), values.end());
  } else {
    if (d.shape.head_dim_k % 2 != 0)
      meta.fail("head_dim",
                joined_text(d.shape.head_dim_k, " is odd; rotary pairs need an even number or rope_inv_freq"));
    // Before the frequencies are made: a head_dim that no tensor confirms must not cost memory.
    require_shape(file.at("layers.0.k"), {d.shape.kv_heads, -1, d.shape.head_dim_k});
    d.rope_inv_freq = rope_frequencies(d.rope_theta, d.shape.head_dim_k);
  }

  const auto positions = require_ascending(file.at("positions"));
  if (positions.size() > static_cast<std::size_t>(std::numeric_limits<index_t>::max()))
    fail_format(file.at("positions").where, ": ", positions.size(), " entries; at most 2^31 - 1 are legal");
  d.positions.assign(positions.begin(), positions.end());
  const auto q_positions = require_ascending(file.at("q_positions"));
  d.q_positions.assign(q_positions.begin(), q_positions.end());
  require_shape(file.at("token_ids"), {d.tokens()});
  const auto token_ids = file.at("token_ids").as<index_t>();
  d.token_ids.assign(token_ids.begin(), token_ids.end());
  if (const auto problem = dump_info_problem(d); !problem.empty()) fail_format(file.name(), ": ", problem);
  return d;
}

}  // namespace kvevict::inline KVEVICT_ABI
