// A model's folder: config.json and the weights that it asks for. An input is both, with a zero byte between them.
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"
#include "kvevict/model/config.hpp"
#include "kvevict/model/weights.hpp"
#include "unit/model/tiny_model.hpp"

namespace kvevict::fuzz {
namespace {

std::string seed(const std::string& type, bool tied) {
  const testing::TempDir folder;
  testing::TinyModel model;
  model.config = {{"model_type", type},         {"hidden_act", "silu"},   {"hidden_size", 4},
                  {"intermediate_size", 3},     {"num_hidden_layers", 1}, {"num_attention_heads", 2},
                  {"num_key_value_heads", 1},   {"head_dim", 2},          {"max_position_embeddings", 40},
                  {"rms_norm_eps", 1e-5},       {"rope_theta", 10000.0},  {"vocab_size", 5},
                  {"tie_word_embeddings", tied}};
  model.fill().write<fp16_t>(folder.path());
  if (type == "llama")
    model.config["rope_scaling"] = {{"rope_type", "llama3"},
                                    {"factor", 8.0},
                                    {"low_freq_factor", 1.0},
                                    {"high_freq_factor", 4.0},
                                    {"original_max_position_embeddings", 8192}};
  return model.config.dump() + '\0' + testing::read_bytes(folder / "model.safetensors");
}

std::string mutate(std::string_view input, std::size_t most, Random& random) {
  const std::size_t cut = input.find('\0');
  if (cut == input.npos) return mutate_text(std::string(input), most - input.size());
  std::string config(input.substr(0, cut)), weights(input.substr(cut + 1));
  auto fields = nlohmann::ordered_json::parse(config, nullptr, false);
  if (random.integer(0, 1) == 0) {
    weights = mutate_safetensors(weights, most - cut - 1, random);
  } else if (fields.is_object() && !fields.empty() && random.integer(0, 3) != 0) {
    static const std::vector<nlohmann::ordered_json> values{0,
                                                            1,
                                                            2,
                                                            3,
                                                            4,
                                                            8,
                                                            -1,
                                                            1 << 28,
                                                            1u << 31,
                                                            0.5,
                                                            1e300,
                                                            -0.0,
                                                            true,
                                                            false,
                                                            nullptr,
                                                            "qwen2",
                                                            "qwen3",
                                                            "mistral",
                                                            nlohmann::ordered_json::array(),
                                                            nlohmann::ordered_json::object()};
    auto at = fields.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random.bits() % fields.size()));
    if (at.value().is_object() && !at.value().empty() && random.integer(0, 1)) {
      auto inner = at.value().begin();
      std::advance(inner, static_cast<std::ptrdiff_t>(random.bits() % at.value().size()));
      inner.value() = values[random.bits() % values.size()];
    } else {
      at.value() = values[random.bits() % values.size()];
    }
    config = fields.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  } else {
    config = mutate_text(std::move(config));
  }
  return config + '\0' + weights;
}

// A folder whose two files are the halves of the input.
struct Folder {
  testing::TempDir folder;
  InputFile config, weights;
  Folder() {
    std::filesystem::create_symlink(config.path(), folder / "config.json");
    std::filesystem::create_symlink(weights.path(), folder / "model.safetensors");
  }
};

void run(std::string_view input) {
  static Folder halves;
  const std::size_t cut = input.find('\0');
  halves.config.set(input.substr(0, cut));
  halves.weights.set(cut == input.npos ? std::string_view() : input.substr(cut + 1));
  const ModelConfig config = read_model_config(halves.folder.path());
  const ModelWeights weights = load_weights(halves.folder.path(), config);
  for (const float x : weights.norm) use(static_cast<double>(x));
  for (const LayerWeights& layer : weights.layers)
    for (const float x : layer.attention_norm) use(static_cast<double>(x));
}

}  // namespace

const Target& target() {
  static const Target t{{seed("llama", true), seed("qwen2", false), seed("qwen3", true)}, run, mutate};
  return t;
}

}  // namespace kvevict::fuzz
