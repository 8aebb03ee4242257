// LKV weights on disk: the safetensors file `kvevict-lkv`, version 1 (docs/policies/lkv.md has the fields). Read by
// mmap; a half-precision file is widened once. Sizes come from the tensors' shapes.
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/lkv/head_net.hpp"
#include "kvevict/lkv/lkv_file.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What describes a set of LKV weights.
struct LkvSizes {
  index_t layers = 0, kv_heads = 0;
  index_t head_dim_k = 0, head_dim_v = 0;
  TokenInput input;                         // how a row becomes an input of LKV-T
  index_t head_width = 0, head_hidden = 0;  // LKV-H: embedding and hidden layer
  index_t token_hidden = 0;                 // LKV-T: hidden layer of each head
  bool head_length = false;                 // LKV-H: slopes over the context's length

  std::int64_t heads() const noexcept { return std::int64_t{layers} * kv_heads; }
  index_t token_inputs() const noexcept { return head_dim_k + head_dim_v + input.features_count(); }
  friend bool operator==(const LkvSizes&, const LkvSizes&) = default;
};

// Everything a file holds, in float32. Tensors as in the file; see HeadNet and TokenNet for their shapes.
struct LkvTensors {
  std::span<const float> embedding, head_w1, head_b1, head_w2;  // [heads][width], [width][hidden], [hidden], [hidden]
  std::span<const float> token_w1, token_b1, token_w2;          // [heads][inputs][hidden], [heads][hidden] twice
  std::span<const float> head_length = {};                      // [heads], or empty
};

class LkvCheckpoint {
 public:
  // Throws format_error naming the file and the field.
  explicit LkvCheckpoint(const std::filesystem::path& path) : file_(path) { read(); }

  const std::string& name() const noexcept { return file_.name(); }
  const LkvSizes& sizes() const noexcept { return sizes_; }
  const LkvTensors& tensors() const noexcept { return tensors_; }
  const std::map<std::string, std::string>& metadata() const noexcept { return file_.metadata(); }

  HeadNet<const float> head_net() const noexcept {
    return {static_cast<index_t>(sizes_.heads()),
            sizes_.head_width,
            sizes_.head_hidden,
            tensors_.embedding.data(),
            tensors_.head_w1.data(),
            tensors_.head_b1.data(),
            tensors_.head_w2.data()};
  }
  // Scores of all heads for contexts of these lengths, both [heads].
  void head_scores(std::span<const index_t> tokens, std::span<double> scores) const {
    kvevict::head_scores(head_net(), scores);
    add_length_scores(tensors_.head_length, tokens, scores);
  }
  TokenNet<const float> token_net(index_t layer, index_t head) const noexcept {
    const std::int64_t at = std::int64_t{layer} * sizes_.kv_heads + head, hidden = sizes_.token_hidden;
    return {sizes_.token_inputs(), sizes_.token_hidden, tensors_.token_w1.data() + at * sizes_.token_inputs() * hidden,
            tensors_.token_b1.data() + at * hidden, tensors_.token_w2.data() + at * hidden};
  }

  // Throws std::invalid_argument naming `who` and both sides unless the weights were made for caches of this shape.
  void check_fits(std::string_view who, const CacheShape& shape) const {
    if (shape.layers != sizes_.layers || shape.kv_heads != sizes_.kv_heads || shape.head_dim_k != sizes_.head_dim_k ||
        shape.head_dim_v != sizes_.head_dim_v)
      fail_argument(who, ": '", name(), "' was trained for ", sizes_.layers, " layers x ", sizes_.kv_heads,
                    " KV heads with keys of ", sizes_.head_dim_k, " and values of ", sizes_.head_dim_v,
                    ", but this cache has ", shape.layers, " x ", shape.kv_heads, " with ", shape.head_dim_k, " and ",
                    shape.head_dim_v, "; a checkpoint belongs to one model");
  }

  static constexpr std::array tensor_names{"lkv_h.embedding", "lkv_h.w1", "lkv_h.b1", "lkv_h.w2",
                                           "lkv_t.w1",        "lkv_t.b1", "lkv_t.w2", "lkv_h.length"};

 private:
  void read() {
    const Metadata meta(file_);
    meta.require_format("kvevict-lkv", "1");
    if (meta.text_or("activation", "silu") != "silu")
      meta.fail("activation", "'" + meta.text("activation") + "'; only silu is known");
    sizes_.layers = meta.count("n_layers", 1);
    sizes_.kv_heads = meta.count("n_kv_heads", 1);
    sizes_.head_dim_k = meta.count("head_dim", 1);
    sizes_.input = {meta.word<KeyFrame>("key_frame"), meta.word_or("features", TokenFeatures::none)};
    for (const auto& [tensor, view] : file_.tensors())
      if (std::find(tensor_names.begin(), tensor_names.end(), tensor) == tensor_names.end())
        fail_format(name(), ": tensor '", tensor,
                    "' is unknown; the file holds lkv_h.{embedding,w1,b1,w2,length} and lkv_t.{w1,b1,w2}");

    const auto& embedding = file_.at("lkv_h.embedding");
    const auto& w1 = file_.at("lkv_h.w1");
    const auto& token_w1 = file_.at("lkv_t.w1");
    const auto size = [&](const TensorView& t, std::size_t axis, std::size_t rank) {
      if (t.shape.size() != rank)
        fail_format(t.where, ": shape ", detail::shape_text(t.shape), "; rank ", rank, " is required");
      if (t.shape[axis] < 1 || t.shape[axis] > 1 << 20)
        fail_format(t.where, ": shape ", detail::shape_text(t.shape), "; sizes from 1 to 2^20 are allowed");
      return t.shape[axis];
    };
    const std::int64_t width = size(embedding, 1, 2), hidden = size(w1, 1, 2), inputs = size(token_w1, 2, 4),
                       units = size(token_w1, 3, 4), layers = sizes_.layers, heads = sizes_.kv_heads;
    const std::int64_t value = inputs - sizes_.head_dim_k - sizes_.input.features_count();
    if (value < 1)
      fail_format(token_w1.where, ": ", inputs, " inputs cannot hold a key of ", sizes_.head_dim_k, ", ",
                  sizes_.input.features_count(), " features (features=", word_of(sizes_.input.features),
                  ") and a value");
    sizes_.head_dim_v = static_cast<index_t>(value);
    sizes_.head_width = static_cast<index_t>(width);
    sizes_.head_hidden = static_cast<index_t>(hidden);
    sizes_.token_hidden = static_cast<index_t>(units);
    tensors_.embedding = floats("lkv_h.embedding", {layers * heads, width});
    tensors_.head_w1 = floats("lkv_h.w1", {width, hidden});
    tensors_.head_b1 = floats("lkv_h.b1", {hidden});
    tensors_.head_w2 = floats("lkv_h.w2", {hidden});
    tensors_.token_w1 = floats("lkv_t.w1", {layers, heads, inputs, units});
    tensors_.token_b1 = floats("lkv_t.b1", {layers, heads, units});
    tensors_.token_w2 = floats("lkv_t.w2", {layers, heads, units});
    sizes_.head_length = file_.contains("lkv_h.length");
    if (sizes_.head_length) tensors_.head_length = floats("lkv_h.length", {layers * heads});
  }

  std::span<const float> floats(std::string_view tensor, const std::vector<std::int64_t>& shape) {
    const TensorView& t = file_.at(tensor);
    if (t.shape != shape)
      fail_format(t.where, ": shape ", detail::shape_text(t.shape), " does not fit the other tensors; ",
                  detail::shape_text(shape), " is required");
    if (t.dtype == DType::f32) return finite(t, t.as<float>());
    if (t.dtype != DType::f16) fail_format(t.where, ": dtype ", dtype_name(t.dtype), "; F32 or F16 is required");
    auto& wide = widened_.emplace_back();
    wide.reserve(t.size());
    for (const fp16_t v : t.as<fp16_t>()) wide.push_back(to_float(v));
    return finite(t, wide);
  }
  static std::span<const float> finite(const TensorView& t, std::span<const float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!std::isfinite(values[i])) fail_format(t.where, ": value ", i, " is ", values[i], "; weights are finite");
    return values;
  }

  Safetensors file_;
  LkvSizes sizes_;
  LkvTensors tensors_;
  std::vector<std::vector<float>> widened_;
};

// Writes a checkpoint, whole or not at all. metadata: the model's name and the recipe that made the weights; the fields
// of the format are added. half: store float16. Throws std::invalid_argument where tensors do not have the stated
// sizes.
inline void write_lkv_checkpoint(const std::filesystem::path& path, const LkvSizes& sizes, const LkvTensors& tensors,
                                 const std::map<std::string, std::string>& metadata, bool half = false) {
  SafetensorsWriter out;
  for (const auto& [key, value] : metadata) out.metadata(key, value);
  out.metadata("format", "kvevict-lkv");
  out.metadata("version", "1");
  out.metadata("activation", "silu");
  out.metadata("n_layers", std::to_string(sizes.layers));
  out.metadata("n_kv_heads", std::to_string(sizes.kv_heads));
  out.metadata("head_dim", std::to_string(sizes.head_dim_k));
  out.metadata("key_frame", print_value(sizes.input.key_frame));
  out.metadata("features", print_value(sizes.input.features));
  const std::int64_t layers = sizes.layers, heads = sizes.kv_heads, inputs = sizes.token_inputs(),
                     units = sizes.token_hidden, width = sizes.head_width, hidden = sizes.head_hidden;
  const std::pair<std::span<const float>, std::vector<std::int64_t>> entries[] = {
      {tensors.embedding, {layers * heads, width}},
      {tensors.head_w1, {width, hidden}},
      {tensors.head_b1, {hidden}},
      {tensors.head_w2, {hidden}},
      {tensors.token_w1, {layers, heads, inputs, units}},
      {tensors.token_b1, {layers, heads, units}},
      {tensors.token_w2, {layers, heads, units}},
      {tensors.head_length, {layers * heads}}};
  std::vector<std::vector<fp16_t>> narrow;
  narrow.reserve(std::size(entries));
  for (std::size_t i = 0; i < std::size(entries); ++i) {
    const auto& [values, shape] = entries[i];
    if (i + 1 == std::size(entries) && !sizes.head_length) break;
    if (!half) {
      out.add(LkvCheckpoint::tensor_names[i], shape, values);
      continue;
    }
    auto& row = narrow.emplace_back();
    row.reserve(values.size());
    for (const float v : values) row.push_back(from_float<fp16_t>(v));
    out.add(LkvCheckpoint::tensor_names[i], shape, std::span<const fp16_t>(row));
  }
  out.write(path);
}

}  // namespace kvevict::inline KVEVICT_ABI
