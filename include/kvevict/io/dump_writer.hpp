// Writer of recorded model runs: `kvevict-dump`, version 1 (docs/file-formats.md). A recorder collects the layers of a
// run and writes the file at its end, whole or not at all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/dump_info.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/rope/frequencies.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Rows of one layer, row-major. T = tokens, W = q_positions. Empty extras are left out of the file.
template <CacheElement T>
struct DumpLayer {
  std::vector<T> k, v;          // [kv_heads][T][head_dim], keys post-RoPE
  std::vector<T> q;             // [q_heads][W][head_dim], post-RoPE
  std::vector<float> attn_sum;  // [q_heads][prompt_len]
  std::vector<float> q_mean;    // [q_heads][head_dim], pre-RoPE
  std::vector<float> q_cov;     // [q_heads][head_dim][head_dim]
  std::vector<T> o_proj;        // [hidden][q_heads * head_dim]
};

// Throws std::invalid_argument where the layers do not fit `info`, std::system_error where the file cannot be written.
template <CacheElement T>
void write_dump(const std::filesystem::path& path, DumpInfo info, const std::vector<DumpLayer<T>>& layers) {
  check_shape(info.shape);
  const CacheShape& s = info.shape;
  if (s.head_dim_k != s.head_dim_v)
    fail_argument("write_dump: head_dim_k ", s.head_dim_k, ", head_dim_v ", s.head_dim_v, "; a dump has one head_dim");
  if (static_cast<std::int64_t>(layers.size()) != s.layers)
    fail_argument("write_dump: ", layers.size(), " layers; the shape has ", s.layers);
  const bool own_frequencies = !info.rope_inv_freq.empty();
  if (!own_frequencies) {
    if (s.head_dim_k % 2 != 0) fail_argument("write_dump: head_dim ", s.head_dim_k, " is odd; rope_inv_freq is needed");
    info.rope_inv_freq = rope_frequencies(info.rope_theta, s.head_dim_k);
  }
  for (const auto* list : {&info.positions, &info.q_positions})
    for (std::size_t i = 0; i < list->size(); ++i)
      if ((*list)[i] < 0 || (i != 0 && (*list)[i] <= (*list)[i - 1]))
        fail_argument("write_dump: positions: entry ", i, " is ", (*list)[i], "; they ascend from 0 on");
  if (!(info.softmax_scale > 0) || !(info.rope_attention_factor > 0) || (!own_frequencies && !(info.rope_theta > 0)))
    fail_argument("write_dump: softmax_scale ", info.softmax_scale, ", rope_attention_factor ",
                  info.rope_attention_factor, ", rope_theta ", info.rope_theta, "; numbers above 0 are required");
  if (const auto problem = dump_info_problem(info); !problem.empty()) fail_argument("write_dump: ", problem);

  SafetensorsWriter file;
  const auto put = [&](const char* key, const auto& value) { file.metadata(key, print_value(value)); };
  file.metadata("format", "kvevict-dump");
  file.metadata("version", "1");
  file.metadata("model", info.model);
  if (!info.description.empty()) file.metadata("description", info.description);
  file.metadata("dtype", element_name<T>());
  file.metadata("rope_style", std::string(word_of(info.rope_style)));
  put("n_layers", s.layers);
  put("n_kv_heads", s.kv_heads);
  put("n_q_heads", s.q_heads);
  put("head_dim", s.head_dim_k);
  put("prompt_len", info.prompt_len);
  put("softmax_scale", info.softmax_scale);
  put("q_stats_first", info.q_stats_first);
  put("rope_attention_factor", info.rope_attention_factor);
  if (info.rope_theta > 0) put("rope_theta", info.rope_theta);
  if (!info.layers.empty()) {
    std::string numbers;
    for (const auto l : info.layers) numbers += (numbers.empty() ? "" : ",") + std::to_string(l);
    file.metadata("layers", numbers);
  }

  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, const auto& elements) {
    file.add(name, std::move(shape), std::span(elements));
  };
  const std::int64_t d = s.head_dim_k, tokens = info.tokens(), queries = std::ssize(info.q_positions);
  add("positions", {tokens}, info.positions);
  add("token_ids", {tokens}, info.token_ids);
  add("q_positions", {queries}, info.q_positions);
  if (own_frequencies) add("rope_inv_freq", {std::ssize(info.rope_inv_freq)}, info.rope_inv_freq);
  for (index_t l = 0; l < s.layers; ++l) {
    const DumpLayer<T>& layer = layers[static_cast<std::size_t>(l)];
    const std::string prefix = joined_text("layers.", l, '.');
    const auto extra = [&](const char* kind, std::vector<std::int64_t> shape, const auto& elements) {
      if (!elements.empty()) add(prefix + kind, std::move(shape), elements);
    };
    add(prefix + "k", {s.kv_heads, tokens, d}, layer.k);
    add(prefix + "v", {s.kv_heads, tokens, d}, layer.v);
    add(prefix + "q", {s.q_heads, queries, d}, layer.q);
    extra("attn_sum", {s.q_heads, info.prompt_len}, layer.attn_sum);
    extra("q_mean", {s.q_heads, d}, layer.q_mean);
    extra("q_cov", {s.q_heads, d, d}, layer.q_cov);
    extra("o_proj", {std::ssize(layer.o_proj) / (s.q_heads * d), s.q_heads * d}, layer.o_proj);
  }
  file.write(path);
}

}  // namespace kvevict::inline KVEVICT_ABI
