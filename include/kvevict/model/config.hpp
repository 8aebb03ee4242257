// config.json of a Hugging Face style folder: the Llama family (llama, mistral, qwen2, qwen3; SmolLM2 is a llama).
// Read strictly: a field that is not known could change the arithmetic, so it is refused by name, and so is every known
// field whose value asks for something that the decoder does not compute.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/json.hpp"
#include "kvevict/rope/frequencies.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What the decoder needs to know about a model. Plain data: a test may fill it by hand.
struct ModelConfig {
  std::string model_type = "llama";
  index_t layers = 0, hidden = 0, feed_forward = 0, vocabulary = 0, most_positions = 0;
  index_t q_heads = 0, kv_heads = 0, head_dim = 0;
  float norm_epsilon = 1e-6f;
  RopeStyle rope_style = RopeStyle::half;
  std::vector<float> inv_freq;  // [head_dim / 2]
  double rope_theta = 10000;
  bool rope_scaled = false;  // inv_freq is not what rope_theta alone gives
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of each query and key head before RoPE
  bool tied = false;     // the output matrix is the embedding

  CacheShape cache_shape() const noexcept { return {layers, kv_heads, q_heads, head_dim, head_dim}; }
  float softmax_scale() const noexcept { return 1.f / std::sqrt(static_cast<float>(head_dim)); }
  // Valid while this config lives.
  Rope rope() const& noexcept { return {rope_style, head_dim, inv_freq, 1.f}; }
  Rope rope() const&& = delete;
};

namespace detail {

class ConfigReader {
 public:
  ConfigReader(nlohmann::json fields, std::string where) : fields_(std::move(fields)), where_(std::move(where)) {
    if (!fields_.is_object()) fail_format(where_, ": is not a JSON object");
  }

  ModelConfig read() {
    ModelConfig c;
    c.model_type = text_field("model_type");
    const auto type = c.model_type;
    if (!among(type, {"llama", "mistral", "qwen2", "qwen3"}))
      fail_format(where_, ": field `model_type`: \"", type,
                  "\" is unknown; llama, mistral, qwen2 or qwen3 is required");
    check_known();
    c.layers = count_field("num_hidden_layers");
    c.hidden = count_field("hidden_size");
    c.feed_forward = count_field("intermediate_size");
    c.vocabulary = count_field("vocab_size");
    c.most_positions = count_field("max_position_embeddings");
    c.q_heads = count_field("num_attention_heads");
    c.kv_heads = given("num_key_value_heads") || type != "llama" ? count_field("num_key_value_heads") : c.q_heads;
    if (!given("head_dim") && c.hidden % c.q_heads != 0)
      fail_format(where_, ": field `hidden_size`: ", c.hidden, " does not divide evenly over ", c.q_heads,
                  " heads; `head_dim` is required");
    c.head_dim = given("head_dim") ? count_field("head_dim") : c.hidden / c.q_heads;
    if (c.head_dim % 2 != 0) fail_format(where_, ": field `head_dim`: ", c.head_dim, "; RoPE needs an even number");
    if (c.q_heads % c.kv_heads != 0)
      fail_format(where_, ": field `num_key_value_heads`: ", c.q_heads, " query heads do not divide evenly over ",
                  c.kv_heads, " KV heads");
    c.norm_epsilon = static_cast<float>(number_field("rms_norm_eps", 1e-6));
    const bool bias = flag_field("attention_bias", false);
    c.qkv_bias = bias || type == "qwen2";
    c.o_bias = bias;
    c.mlp_bias = flag_field("mlp_bias", false);
    c.qk_norm = type == "qwen3";
    c.tied = flag_field("tie_word_embeddings", false);
    if (type == "qwen2" && bias) refuse("attention_bias", "qwen2 has biases in q, k and v alone");
    read_rope(c);
    refuse_variants(type);
    return c;
  }

 private:
  static bool among(std::string_view name, std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  [[noreturn]] void refuse(std::string_view field, std::string_view why) const {
    fail_format(where_, ": field `", field, "`: ", fields_.value(std::string(field), nlohmann::json()).dump(), "; ",
                why);
  }
  bool given(const char* field) const { return fields_.contains(field) && !fields_[field].is_null(); }

  // Fields that say nothing about the arithmetic of inference.
  static bool neutral(std::string_view field) {
    return field.starts_with('_') || among(field, {"architectures",
                                                   "attention_dropout",
                                                   "auto_map",
                                                   "bos_token_id",
                                                   "chunk_size_feed_forward",
                                                   "dtype",
                                                   "eos_token_id",
                                                   "id2label",
                                                   "initializer_range",
                                                   "is_llama_config",
                                                   "keys_to_ignore_at_inference",
                                                   "label2id",
                                                   "max_window_layers",
                                                   "output_attentions",
                                                   "output_hidden_states",
                                                   "pad_token_id",
                                                   "problem_type",
                                                   "return_dict",
                                                   "task_specific_params",
                                                   "torch_dtype",
                                                   "transformers.js_config",
                                                   "transformers_version",
                                                   "use_cache",
                                                   "is_decoder",
                                                   "is_encoder_decoder",
                                                   "unsloth_version",
                                                   "unsloth_fixed",
                                                   "unk_token_id"});
  }
  void check_known() const {
    for (const auto& [field, value] : fields_.items()) {
      const bool known =
          neutral(field) || among(field, {"model_type",          "num_hidden_layers",   "hidden_size",
                                          "intermediate_size",   "vocab_size",          "max_position_embeddings",
                                          "num_attention_heads", "num_key_value_heads", "head_dim",
                                          "rms_norm_eps",        "attention_bias",      "mlp_bias",
                                          "tie_word_embeddings", "rope_theta",          "rope_scaling",
                                          "rope_parameters",     "rope_interleaved",    "partial_rotary_factor",
                                          "hidden_act",          "sliding_window",      "use_sliding_window",
                                          "layer_types",         "pretraining_tp",      "quantization_config"});
      if (!known && !value.is_null()) refuse(field, "this field is unknown and may change what the model computes");
    }
  }

  void refuse_variants(std::string_view type) const {
    if (fields_.value("hidden_act", nlohmann::json("silu")) != "silu") refuse("hidden_act", "\"silu\" is required");
    if (given("quantization_config")) refuse("quantization_config", "weights in f32, f16 or bf16 are required");
    if (number_field("partial_rotary_factor", 1) != 1) refuse("partial_rotary_factor", "1 is required");
    // Mistral's window is active where it is set; the others have a switch.
    if (flag_field("use_sliding_window", type == "mistral" && given("sliding_window")))
      refuse("sliding_window", "attention over a sliding window is not supported; null is required");
    if (given("layer_types"))
      for (const auto& kind : fields_["layer_types"])
        if (kind != "full_attention") refuse("layer_types", "\"full_attention\" in every layer is required");
  }

  void read_rope(ModelConfig& c) const {
    c.rope_style = flag_field("rope_interleaved", false) ? RopeStyle::interleaved : RopeStyle::half;
    c.rope_theta = number_field("rope_theta", 10000);
    const char* name = given("rope_parameters") ? "rope_parameters" : "rope_scaling";  // newer writers use the former
    const nlohmann::json scaling = given(name) ? fields_[name] : nlohmann::json::object();
    if (!scaling.is_object()) refuse(name, "an object is required");
    const auto number = [&](const char* field) {
      if (!scaling.contains(field) || !scaling[field].is_number() || scaling[field].get<double>() <= 0)
        refuse(name, joined_text("a positive number `", field, "` is required"));
      return scaling[field].get<double>();
    };
    if (scaling.contains("rope_theta")) c.rope_theta = number("rope_theta");
    if (!(c.rope_theta > 0) || !std::isfinite(c.rope_theta)) refuse("rope_theta", "a positive number is required");
    c.inv_freq = rope_frequencies(c.rope_theta, c.head_dim);
    const auto type = scaling.value("rope_type", scaling.value("type", nlohmann::json("default")));
    const bool llama3 = type == "llama3";
    if (!llama3 && type != "default") refuse(name, "rope_type \"default\" or \"llama3\" is required");
    for (const auto& [field, value] : scaling.items())
      if (!among(field, {"rope_type", "type", "rope_theta"}) &&
          !(llama3 &&
            among(field, {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})) &&
          !(field == "partial_rotary_factor" && value == 1))
        refuse(name, joined_text("`", field, "` in it is unknown"));
    if (!llama3) return;
    const double low = number("low_freq_factor"), high = number("high_freq_factor");
    if (high <= low) refuse(name, "high_freq_factor above low_freq_factor is required");
    c.rope_scaled = true;
    scale_llama3(c.inv_freq, number("factor"), low, high, number("original_max_position_embeddings"));
  }

  std::string text_field(const char* field) const {
    if (!fields_.contains(field) || !fields_[field].is_string()) refuse(field, "a text is required");
    return fields_[field].get<std::string>();
  }
  index_t count_field(const char* field) const {
    constexpr std::int64_t most = 1 << 28;
    if (!given(field) || !fields_[field].is_number_integer() || fields_[field].get<double>() < 1 ||
        fields_[field].get<double>() > most)
      refuse(field, joined_text("a number from 1 to ", most, " is required"));
    return fields_[field].get<index_t>();
  }
  double number_field(const char* field, double otherwise) const {
    if (!given(field)) return otherwise;
    if (!fields_[field].is_number() || !(fields_[field].get<double>() > 0))
      refuse(field, "a positive number is required");
    return fields_[field].get<double>();
  }
  bool flag_field(const char* field, bool otherwise) const {
    if (!given(field)) return otherwise;
    if (!fields_[field].is_boolean()) refuse(field, "true or false is required");
    return fields_[field].get<bool>();
  }

  nlohmann::json fields_;
  std::string where_;
};

}  // namespace detail

// Throws format_error naming `where` and the field.
inline ModelConfig parse_model_config(std::string_view json, const std::string& where) {
  return detail::ConfigReader(parse_json(json, where), where).read();
}

// Reads folder/config.json.
inline ModelConfig read_model_config(const std::filesystem::path& folder) {
  const auto path = folder / "config.json";
  std::ifstream in(path, std::ios::binary);
  if (!in) fail_format(path.string(), ": cannot be opened; a folder with config.json and *.safetensors is required");
  const std::string content{std::istreambuf_iterator<char>(in), {}};
  return parse_model_config(content, path.string());
}

}  // namespace kvevict::inline KVEVICT_ABI
