// What a model folder may hold, and how everything else is refused: model/config.hpp and model/weights.hpp.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "common/temp_dir.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/model/config.hpp"
#include "kvevict/model/weights.hpp"
#include "unit/model/tiny_model.hpp"

using namespace kvevict;
using kvevict::testing::read_bytes;
using kvevict::testing::TempDir;
using kvevict::testing::TinyModel;
using kvevict::testing::write_bytes;

namespace {

ModelConfig parsed(const char* field, const nlohmann::json& value) {
  TinyModel m;
  m.config[field] = value;
  return parse_model_config(m.config.dump(), "config.json");
}

std::string refusal(const char* field, const nlohmann::json& value) {
  try {
    parsed(field, value);
  } catch (const format_error& e) {
    return e.what();
  }
  return "accepted";
}

std::string loading(const TinyModel& model, const TempDir& dir) {
  try {
    load_weights(dir.path(), parse_model_config(model.config.dump(), "config.json"));
  } catch (const format_error& e) {
    return e.what();
  }
  return "loaded";
}

}  // namespace

TEST_CASE("the config of a llama is read field by field") {
  const ModelConfig c = parsed("rope_theta", 100000.0);
  CHECK(c.cache_shape() == CacheShape{3, 2, 6, 8, 8});
  CHECK(c.hidden == 24);
  CHECK(c.feed_forward == 40);
  CHECK(c.vocabulary == 50);
  CHECK(c.most_positions == 400);
  CHECK(c.norm_epsilon == 1e-5f);
  CHECK(c.tied);
  CHECK_FALSE(c.qkv_bias);
  CHECK(c.inv_freq.size() == 4);
  CHECK(c.inv_freq[0] == 1.f);
  CHECK(c.inv_freq[2] == doctest::Approx(std::pow(1e5, -0.5)));
  CHECK(c.softmax_scale() == doctest::Approx(1 / std::sqrt(8.0)));
}

TEST_CASE("without head_dim and num_key_value_heads, llama's defaults hold") {
  TinyModel m;
  m.config.erase("head_dim");
  m.config.erase("num_key_value_heads");
  const ModelConfig c = parse_model_config(m.config.dump(), "config.json");
  CHECK(c.head_dim == 4);
  CHECK(c.kv_heads == 6);
}

TEST_CASE("a config that asks for other arithmetic is refused with the name of the field") {
  CHECK(refusal("model_type", "gpt2").find("field `model_type`: \"gpt2\" is unknown") != std::string::npos);
  CHECK(refusal("hidden_act", "gelu").find("field `hidden_act`") != std::string::npos);
  CHECK(refusal("num_local_experts", 8).find("field `num_local_experts`: 8; this field is unknown") !=
        std::string::npos);
  CHECK(refusal("quantization_config", {{"bits", 4}}).find("field `quantization_config`") != std::string::npos);
  CHECK(refusal("partial_rotary_factor", 0.5).find("field `partial_rotary_factor`") != std::string::npos);
  CHECK(refusal("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}).find("field `rope_scaling`") !=
        std::string::npos);
  CHECK(refusal("rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}).find("`low_freq_factor` is required") !=
        std::string::npos);
  CHECK(refusal("use_sliding_window", true).find("field `sliding_window`") != std::string::npos);
  CHECK(refusal("layer_types", {"full_attention", "sliding_attention"}).find("field `layer_types`") !=
        std::string::npos);
  CHECK(refusal("num_key_value_heads", 4).find("field `num_key_value_heads`: 6 query heads") != std::string::npos);
  CHECK(refusal("head_dim", 7).find("field `head_dim`: 7; RoPE needs an even number") != std::string::npos);
  CHECK(refusal("vocab_size", 0).find("field `vocab_size`: 0") != std::string::npos);
  CHECK(refusal("hidden_size", "24").find("field `hidden_size`: \"24\"") != std::string::npos);
  CHECK(refusal("tie_word_embeddings", 1).find("field `tie_word_embeddings`: 1; true or false") != std::string::npos);
  TinyModel mistral;
  mistral.config["model_type"] = "mistral";
  mistral.config["sliding_window"] = 4096;
  CHECK_THROWS_WITH(parse_model_config(mistral.config.dump(), "config.json"), doctest::Contains("sliding_window"));
  CHECK_THROWS_WITH(parse_model_config("{\"model_type\":\"llama\",\"model_type\":\"llama\"}", "config.json"),
                    doctest::Contains("stands twice"));
  CHECK_THROWS_WITH(read_model_config("/no/such/folder"), doctest::Contains("cannot be opened"));
}

TEST_CASE("fields that do not touch the arithmetic are accepted") {
  CHECK(refusal("torch_dtype", "bfloat16") == "accepted");
  CHECK(refusal("_name_or_path", "x") == "accepted");
  CHECK(refusal("use_sliding_window", false) == "accepted");
  CHECK(refusal("rope_scaling", nullptr) == "accepted");
  CHECK(refusal("some_future_field", nullptr) == "accepted");
}

TEST_CASE("missing, superfluous, misshapen and truncated weights are refused by name") {
  TinyModel model;
  model.fill();
  const TempDir dir;
  SUBCASE("missing") {
    model.tensors.erase("model.layers.1.mlp.up_proj.weight");
    model.write(dir.path());
    CHECK(loading(model, dir).find("tensor 'model.layers.1.mlp.up_proj.weight' is missing") != std::string::npos);
  }
  SUBCASE("claimed by the config alone, and larger than memory") {
    model.config["intermediate_size"] = 1 << 28;
    model.write(dir.path());
    CHECK(loading(model, dir).find("mlp.gate_proj.weight': shape") != std::string::npos);
  }
  SUBCASE("superfluous") {
    model.tensors["model.layers.0.self_attn.q_norm.weight"] = {{8}, std::vector<float>(8)};
    model.write(dir.path());
    const auto what = loading(model, dir);
    CHECK(what.find("q_norm.weight': the config has no place for this tensor") != std::string::npos);
  }
  SUBCASE("misshapen") {
    model.tensors["model.norm.weight"] = {{23}, std::vector<float>(23)};
    model.write(dir.path());
    CHECK(loading(model, dir).find("model.norm.weight': shape [23]; the config asks for [24]") != std::string::npos);
  }
  SUBCASE("truncated") {
    model.write(dir.path());
    const auto bytes = read_bytes(dir / "model.safetensors");
    write_bytes(dir / "model.safetensors", bytes.substr(0, bytes.size() - 100));
    CHECK(loading(model, dir).find("truncated?") != std::string::npos);
  }
  SUBCASE("of another type") {
    TinyModel other = model;
    other.write(dir.path());
    auto bytes = read_bytes(dir / "model.safetensors");
    for (std::size_t at = 0; (at = bytes.find("\"F32\"", at)) != std::string::npos;) bytes.replace(at, 5, "\"I32\"");
    write_bytes(dir / "model.safetensors", bytes);
    CHECK(loading(model, dir).find("dtype I32; F32, F16 or BF16 is required") != std::string::npos);
  }
  SUBCASE("no file at all") { CHECK(loading(model, dir).find("model.safetensors") != std::string::npos); }
}

TEST_CASE("a tied output matrix may be stored again, but not contradict the embedding") {
  TinyModel model;
  model.fill();
  const TempDir dir;
  model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"];
  model.write(dir.path());
  CHECK(loading(model, dir) == "loaded");
  model.tensors["lm_head.weight"].values[5] += 1;
  model.write(dir.path());
  CHECK(loading(model, dir).find("differs from the embedding") != std::string::npos);
}

TEST_CASE("an index must match its shards") {
  TinyModel model;
  model.fill();
  const TempDir dir;
  model.write(dir.path(), 2);
  CHECK(loading(model, dir) == "loaded");
  const auto index = dir / "model.safetensors.index.json";
  const auto good = nlohmann::json::parse(read_bytes(index));
  const auto with = [&](auto change) {
    auto changed = good;
    change(changed["weight_map"]);
    write_bytes(index, changed.dump());
    return loading(model, dir);
  };
  const auto name = "model.norm.weight";
  CHECK(with([&](auto& map) { map.erase(name); }).find("model.norm.weight': is not listed in") != std::string::npos);
  CHECK(with([&](auto& map) { map[name] = "../other.safetensors"; }).find("is not the name of a file beside it") !=
        std::string::npos);
  CHECK(with([&](auto& map) { map["model.absent"] = map[name]; }).find("'model.absent' is missing") !=
        std::string::npos);
  CHECK(with([&](auto& map) { map[name] = 3; }).find("is not the name of a file") != std::string::npos);
  write_bytes(index, "{}");
  CHECK(loading(model, dir).find("field `weight_map`") != std::string::npos);
}
