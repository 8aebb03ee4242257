// The weights of a Hugging Face style folder, checked against its config and brought into the form the decoder computes
// with: float32, packed for the products, q, k and v in one matrix, gate and up in another.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/json.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/model/config.hpp"
#include "kvevict/model/packed.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct LayerWeights {
  std::vector<float> attention_norm, mlp_norm;  // [hidden]
  PackedMatrix qkv;                             // [(q_heads + 2 kv_heads) * head_dim][hidden]
  std::vector<float> qkv_bias;                  // the same rows, or empty
  std::vector<float> q_norm, k_norm;            // [head_dim], or empty
  PackedMatrix o;                               // [hidden][q_heads * head_dim]
  std::vector<float> o_bias;                    // [hidden], or empty
  PackedMatrix gate_up, down;                   // [2 * feed_forward][hidden], [hidden][feed_forward]
  std::vector<float> gate_up_bias, down_bias;   // or empty
};

struct ModelWeights {
  PackedMatrix embedding;  // [vocabulary][hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> norm;  // [hidden]
  PackedMatrix output;      // [vocabulary][hidden]; empty where the embedding is the output matrix

  const PackedMatrix& logits() const noexcept { return output.outputs() > 0 ? output : embedding; }
};

namespace detail {

// The tensors of model.safetensors, or of the shards that model.safetensors.index.json lists.
class WeightFolder {
 public:
  explicit WeightFolder(const std::filesystem::path& folder) {
    const auto index = folder / "model.safetensors.index.json";
    if (std::filesystem::exists(index)) {
      where_ = index.string();
      read_index(folder);
    } else {
      where_ = (folder / "model.safetensors").string();
      files_.emplace_back(folder / "model.safetensors");
      for (const auto& [name, tensor] : files_.back().tensors()) tensors_.emplace(name, &tensor);
    }
  }

  bool contains(const std::string& name) const { return tensors_.contains(name); }
  // Throws format_error where the tensor is missing or its shape or type does not fit.
  const TensorView& take(const std::string& name, const std::vector<std::int64_t>& shape) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail_format(where_, ": tensor '", name, "' is missing");
    const TensorView& tensor = *found->second;
    if (tensor.shape != shape)
      fail_format(tensor.where, ": shape ", shape_text(tensor.shape), "; the config asks for ", shape_text(shape));
    if (tensor.dtype != DType::f32 && tensor.dtype != DType::f16 && tensor.dtype != DType::bf16)
      fail_format(tensor.where, ": dtype ", dtype_name(tensor.dtype), "; F32, F16 or BF16 is required");
    used_.insert(name);
    return tensor;
  }
  // Throws where a tensor has not been taken: it would change what the model computes.
  void check_all_used() const {
    for (const auto& [name, tensor] : tensors_)
      if (!used_.contains(name) && !name.ends_with("rotary_emb.inv_freq"))  // a buffer that old writers stored
        fail_format(tensor->where, ": the config has no place for this tensor");
  }

 private:
  void read_index(const std::filesystem::path& folder) {
    std::ifstream in(where_, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(in), {}};
    const auto index = parse_json(content, where_);
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
      fail_format(where_, ": field `weight_map`: an object {tensor: file} is required");
    std::map<std::string, std::size_t> opened;
    for (const auto& [name, file] : index["weight_map"].items()) {
      const auto shard = file.is_string() ? file.get<std::string>() : std::string();
      if (shard.empty() || std::filesystem::path(shard).filename() != shard)
        fail_format(where_, ": field `weight_map`: '", name, "': ", file.dump(),
                    " is not the name of a file beside it");
      opened.emplace(shard, 0);
    }
    files_.reserve(opened.size());
    for (auto& [shard, number] : opened) {
      number = files_.size();
      files_.emplace_back(folder / shard);
    }
    for (const auto& [name, file] : index["weight_map"].items())
      tensors_.emplace(name, &files_[opened[file.get<std::string>()]].at(name));
    for (const auto& file : files_)
      for (const auto& [name, tensor] : file.tensors())
        if (!tensors_.contains(name)) fail_format(tensor.where, ": is not listed in ", where_);
  }

  std::string where_;
  std::vector<Safetensors> files_;
  std::map<std::string, const TensorView*> tensors_;
  std::set<std::string> used_;
};

// visit(values) with the tensor's elements in their own type.
template <class Visit>
void visit_floats(const TensorView& tensor, Visit&& visit) {
  if (tensor.dtype == DType::f32) return visit(tensor.as<float>());
  if (tensor.dtype == DType::f16) return visit(tensor.as<fp16_t>());
  visit(tensor.as<bf16_t>());
}

class WeightLoader {
 public:
  WeightLoader(const std::filesystem::path& folder, const ModelConfig& config) : folder_(folder), config_(config) {}

  ModelWeights load() {
    ModelWeights w;
    const auto& c = config_;
    w.embedding = matrix(c.hidden, {{"model.embed_tokens.weight", c.vocabulary}});
    for (index_t l = 0; l < c.layers; ++l) w.layers.push_back(layer("model.layers." + std::to_string(l) + '.'));
    w.norm = vector("model.norm.weight", c.hidden);
    if (!c.tied) {
      w.output = matrix(c.hidden, {{"lm_head.weight", c.vocabulary}});
    } else if (folder_.contains("lm_head.weight")) {
      check_tied();
    }
    folder_.check_all_used();
    return w;
  }

 private:
  LayerWeights layer(const std::string& prefix) {
    const auto& c = config_;
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    const index_t q = c.q_heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    LayerWeights w;
    w.attention_norm = vector(prefix + "input_layernorm.weight", c.hidden);
    w.mlp_norm = vector(prefix + "post_attention_layernorm.weight", c.hidden);
    w.qkv = matrix(
        c.hidden,
        {{attention + "q_proj.weight", q}, {attention + "k_proj.weight", kv}, {attention + "v_proj.weight", kv}});
    if (c.qkv_bias) {
      append(w.qkv_bias, attention + "q_proj.bias", q);
      append(w.qkv_bias, attention + "k_proj.bias", kv);
      append(w.qkv_bias, attention + "v_proj.bias", kv);
    }
    if (c.qk_norm) {
      w.q_norm = vector(attention + "q_norm.weight", c.head_dim);
      w.k_norm = vector(attention + "k_norm.weight", c.head_dim);
    }
    w.o = matrix(q, {{attention + "o_proj.weight", c.hidden}});
    if (c.o_bias) w.o_bias = vector(attention + "o_proj.bias", c.hidden);
    w.gate_up =
        matrix(c.hidden, {{mlp + "gate_proj.weight", c.feed_forward}, {mlp + "up_proj.weight", c.feed_forward}});
    w.down = matrix(c.feed_forward, {{mlp + "down_proj.weight", c.hidden}});
    if (c.mlp_bias) {
      append(w.gate_up_bias, mlp + "gate_proj.bias", c.feed_forward);
      append(w.gate_up_bias, mlp + "up_proj.bias", c.feed_forward);
      w.down_bias = vector(mlp + "down_proj.bias", c.hidden);
    }
    return w;
  }

  // One matrix of the rows of several tensors, named with their numbers of rows. The tensors are looked up before
  // memory is taken, so that no config asks for more than its weights hold.
  PackedMatrix matrix(index_t inputs, std::initializer_list<std::pair<std::string, index_t>> parts) {
    std::vector<const TensorView*> tensors;
    index_t outputs = 0;
    for (const auto& [name, rows] : parts) {
      tensors.push_back(&folder_.take(name, {rows, inputs}));
      outputs += rows;
    }
    PackedMatrix out(outputs, inputs);
    index_t row = 0;
    for (const TensorView* tensor : tensors)
      visit_floats(*tensor, [&](auto values) {
        const auto* from = values.data();
        for (std::int64_t r = 0; r < tensor->shape[0]; ++r, from += inputs)
          out.set_row(row++, [&](index_t i) { return to_float(from[i]); });
      });
    return out;
  }
  void append(std::vector<float>& out, const std::string& name, index_t size) {
    visit_floats(folder_.take(name, {size}), [&](auto values) {
      std::transform(values.begin(), values.end(), std::back_inserter(out), [](auto x) { return to_float(x); });
    });
  }
  std::vector<float> vector(const std::string& name, index_t size) {
    std::vector<float> out;
    append(out, name, size);
    return out;
  }
  // Some writers store a tied output matrix once more; another one would contradict the config.
  void check_tied() {
    const std::vector<std::int64_t> shape{config_.vocabulary, config_.hidden};
    const auto& output = folder_.take("lm_head.weight", shape);
    const auto& embedding = folder_.take("model.embed_tokens.weight", shape);
    if (output.dtype != embedding.dtype ||
        !std::equal(output.bytes.begin(), output.bytes.end(), embedding.bytes.begin(), embedding.bytes.end()))
      fail_format(output.where, ": differs from the embedding, but the config says tie_word_embeddings");
  }

  WeightFolder folder_;
  const ModelConfig& config_;
};

}  // namespace detail

// Throws format_error naming file and tensor for whatever is missing, too much, of a wrong shape or truncated.
inline ModelWeights load_weights(const std::filesystem::path& folder, const ModelConfig& config) {
  return detail::WeightLoader(folder, config).load();
}

}  // namespace kvevict::inline KVEVICT_ABI
