// A small random model of the Llama family as a folder, and the same model computed once more in double precision by
// the textbook formulas, token by token, with nothing shared with the decoder.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/safetensors.hpp"

namespace kvevict::testing {

struct TinyTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

struct TinyModel {
  nlohmann::json config = {{"model_type", "llama"},      {"hidden_act", "silu"},   {"hidden_size", 24},
                           {"intermediate_size", 40},    {"num_hidden_layers", 3}, {"num_attention_heads", 6},
                           {"num_key_value_heads", 2},   {"head_dim", 8},          {"max_position_embeddings", 400},
                           {"rms_norm_eps", 1e-5},       {"rope_theta", 10000.0},  {"vocab_size", 50},
                           {"tie_word_embeddings", true}};
  std::map<std::string, TinyTensor> tensors;

  int number(const char* field) const { return config[field].get<int>(); }

  // Weights for the config as it stands now.
  TinyModel& fill(std::uint32_t seed = 1) {
    tensors.clear();
    random_ = seed;
    const int hidden = number("hidden_size"), wide = number("intermediate_size"), vocabulary = number("vocab_size");
    const int d = number("head_dim"), q = number("num_attention_heads") * d, kv = number("num_key_value_heads") * d;
    const std::string type = config["model_type"];
    const bool bias = config.value("attention_bias", false), mlp_bias = config.value("mlp_bias", false);
    add("model.embed_tokens.weight", {vocabulary, hidden}, 1.f);
    add("model.norm.weight", {hidden}, 0.3f, 1.f);
    if (!config.value("tie_word_embeddings", false)) add("lm_head.weight", {vocabulary, hidden}, 1.f);
    for (int l = 0; l < number("num_hidden_layers"); ++l) {
      const std::string p = "model.layers." + std::to_string(l) + '.', a = p + "self_attn.", m = p + "mlp.";
      add(p + "input_layernorm.weight", {hidden}, 0.3f, 1.f);
      add(p + "post_attention_layernorm.weight", {hidden}, 0.3f, 1.f);
      for (const auto& [name, rows] : {std::pair{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}}) {
        add(a + name + ".weight", {rows, hidden}, 0.5f);
        if (bias || type == "qwen2") add(a + name + ".bias", {rows}, 0.5f);
      }
      add(a + "o_proj.weight", {hidden, q}, 0.3f);
      if (bias) add(a + "o_proj.bias", {hidden}, 0.5f);
      if (type == "qwen3") {
        add(a + "q_norm.weight", {d}, 0.5f, 1.f);
        add(a + "k_norm.weight", {d}, 0.5f, 1.f);
      }
      for (const auto& [name, rows, cols] :
           {std::tuple{"gate_proj", wide, hidden}, {"up_proj", wide, hidden}, {"down_proj", hidden, wide}}) {
        add(m + name + ".weight", {rows, cols}, 0.3f);
        if (mlp_bias) add(m + name + ".bias", {rows}, 0.5f);
      }
    }
    return *this;
  }

  // config.json and `shards` weight files, with an index where there are several.
  template <class T = float>
  void write(const std::filesystem::path& folder, int shards = 1) const {
    write_bytes(folder / "config.json", config.dump());
    std::map<std::string, std::vector<T>> converted;
    std::vector<SafetensorsWriter> files(static_cast<std::size_t>(shards));
    nlohmann::json map;
    std::size_t next = 0;
    for (const auto& [name, tensor] : tensors) {
      auto& values = converted[name];
      for (const float x : tensor.values) values.push_back(from_float<T>(x));
      const std::size_t file = next++ % files.size();
      files[file].add(name, tensor.shape, std::span<const T>(values));
      map[name] = shard_name(file, shards);
    }
    for (std::size_t f = 0; f < files.size(); ++f) files[f].write(folder / shard_name(f, shards));
    if (shards > 1) write_bytes(folder / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  }

  // Logits [tokens][vocabulary] of a causal pass in double precision.
  std::vector<std::vector<double>> reference(std::span<const index_t> tokens) const {
    const std::size_t n = tokens.size();
    const auto hidden = static_cast<std::size_t>(number("hidden_size"));
    std::vector<std::vector<double>> h(n);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t c = 0; c < hidden; ++c)
        h[i].push_back(get("model.embed_tokens.weight").values[static_cast<std::size_t>(tokens[i]) * hidden + c]);
    for (int l = 0; l < number("num_hidden_layers"); ++l) block(h, "model.layers." + std::to_string(l) + '.');
    const bool tied = config.value("tie_word_embeddings", false);
    for (auto& row : h)
      row = linear(norm(row, "model.norm.weight"), tied ? "model.embed_tokens.weight" : "lm_head.weight", "");
    return h;
  }

 private:
  using Row = std::vector<double>;

  static std::string shard_name(std::size_t file, int shards) {
    return shards == 1 ? "model.safetensors" : "part-" + std::to_string(file) + ".safetensors";
  }
  void add(const std::string& name, std::vector<std::int64_t> shape, float width, float middle = 0.f) {
    std::size_t size = 1;
    for (const auto n : shape) size *= static_cast<std::size_t>(n);
    std::vector<float> values;
    for (std::size_t i = 0; i < size; ++i) {
      random_ = random_ * 1664525u + 1013904223u;
      // A multiple of 1/256 below 2: exact in f16, and in bf16 for most.
      values.push_back(middle + width * (static_cast<float>(random_ >> 24) / 128.f - 1.f));
    }
    tensors[name] = {std::move(shape), std::move(values)};
  }
  const TinyTensor& get(const std::string& name) const { return tensors.at(name); }

  Row norm(const Row& x, const std::string& weight) const {
    double sum = 0;
    for (const double v : x) sum += v * v;
    const double factor = 1 / std::sqrt(sum / static_cast<double>(x.size()) + config["rms_norm_eps"].get<double>());
    Row out;
    for (std::size_t i = 0; i < x.size(); ++i) out.push_back(x[i] * factor * get(weight).values[i]);
    return out;
  }
  Row linear(const Row& x, const std::string& weight, const std::string& bias) const {
    const auto& w = get(weight);
    Row out(static_cast<std::size_t>(w.shape[0]));
    for (std::size_t o = 0; o < out.size(); ++o) {
      out[o] = tensors.contains(bias) ? static_cast<double>(get(bias).values[o]) : 0.0;
      for (std::size_t i = 0; i < x.size(); ++i) out[o] += w.values[o * x.size() + i] * x[i];
    }
    return out;
  }
  Row linear(const Row& x, const std::string& part) const { return linear(x, part + ".weight", part + ".bias"); }

  double frequency(std::size_t i, std::size_t dim) const {
    const double f =
        std::pow(config["rope_theta"].get<double>(), -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    if (!config.contains("rope_scaling") || config["rope_scaling"].is_null()) return f;
    const auto& s = config["rope_scaling"];
    const double wave = 2 * std::numbers::pi / f, original = s["original_max_position_embeddings"].get<double>();
    const double low = s["low_freq_factor"].get<double>(), high = s["high_freq_factor"].get<double>();
    if (wave < original / high) return f;
    if (wave > original / low) return f / s["factor"].get<double>();
    const double mix = (original / wave - low) / (high - low);
    return (1 - mix) * f / s["factor"].get<double>() + mix * f;
  }
  // Head `head` of a projected row, normalised where the model does so, and rotated to `position`.
  Row head_of(const Row& x, std::size_t head, std::size_t d, const std::string& norm_weight,
              std::size_t position) const {
    Row out(x.begin() + static_cast<std::ptrdiff_t>(head * d), x.begin() + static_cast<std::ptrdiff_t>((head + 1) * d));
    if (tensors.contains(norm_weight)) out = norm(out, norm_weight);
    const bool interleaved = config.value("rope_interleaved", false);
    for (std::size_t i = 0; i < d / 2; ++i) {
      const double angle = static_cast<double>(position) * frequency(i, d);
      double &a = out[interleaved ? 2 * i : i], &b = out[interleaved ? 2 * i + 1 : i + d / 2];
      const double first = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = first;
    }
    return out;
  }

  void block(std::vector<Row>& h, const std::string& p) const {
    const auto heads = static_cast<std::size_t>(number("num_attention_heads")),
               d = static_cast<std::size_t>(number("head_dim"));
    const std::size_t group = heads / static_cast<std::size_t>(number("num_key_value_heads"));
    const std::string a = p + "self_attn.";
    std::vector<Row> k, v;
    for (std::size_t i = 0; i < h.size(); ++i) {
      const Row x = norm(h[i], p + "input_layernorm.weight");
      const Row q = linear(x, a + "q_proj");
      k.push_back(linear(x, a + "k_proj"));
      v.push_back(linear(x, a + "v_proj"));
      Row out;
      for (std::size_t head = 0; head < heads; ++head) {
        const Row query = head_of(q, head, d, a + "q_norm.weight", i);
        std::vector<double> weight;
        double total = 0;
        for (std::size_t j = 0; j <= i; ++j) {
          const Row key = head_of(k[j], head / group, d, a + "k_norm.weight", j);
          double s = 0;
          for (std::size_t c = 0; c < d; ++c) s += query[c] * key[c];
          total += weight.emplace_back(std::exp(s / std::sqrt(static_cast<double>(d))));
        }
        for (std::size_t c = 0; c < d; ++c) {
          double s = 0;
          for (std::size_t j = 0; j <= i; ++j) s += weight[j] / total * v[j][head / group * d + c];
          out.push_back(s);
        }
      }
      out = linear(out, a + "o_proj");
      for (std::size_t c = 0; c < out.size(); ++c) h[i][c] += out[c];
      const Row y = norm(h[i], p + "post_attention_layernorm.weight");
      Row gate = linear(y, p + "mlp.gate_proj");
      const Row up = linear(y, p + "mlp.up_proj");
      for (std::size_t c = 0; c < gate.size(); ++c) gate[c] = gate[c] / (1 + std::exp(-gate[c])) * up[c];
      const Row down = linear(gate, p + "mlp.down_proj");
      for (std::size_t c = 0; c < down.size(); ++c) h[i][c] += down[c];
    }
  }

  std::uint32_t random_ = 1;
};

}  // namespace kvevict::testing
