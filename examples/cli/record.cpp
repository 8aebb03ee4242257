// kvevict record: a model run on given tokens, as a dump.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.hpp"
#include "cli/files.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/printable.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/recorder.hpp"

namespace kvevict::tool {
namespace {

// Whole numbers between anything that is not part of a number: spaces, lines, commas, the brackets of a JSON list.
std::vector<index_t> numbers_in(std::string_view text, const std::string& where) {
  constexpr std::string_view between = " \t\r\n,[]";
  std::vector<index_t> out;
  for (std::size_t at = 0; (at = text.find_first_not_of(between, at)) != text.npos;) {
    const std::string_view piece = text.substr(at, text.find_first_of(between, at) - at);
    index_t value = 0;
    const auto [end, error] = std::from_chars(piece.data(), piece.data() + piece.size(), value);
    if (error != std::errc{} || end != piece.data() + piece.size())
      fail_format(where, ": '", piece, "' at byte ", at, " is not a whole number");
    out.push_back(value);
    at += piece.size();
  }
  return out;
}

// Token ids of a text file, of a safetensors file with `token_ids` (a dump has them), or of a task file: the chosen
// context with its continuation.
std::vector<index_t> read_tokens(const RecordCommandOptions& options) {
  const std::string& path = options.tokens;
  if (std::filesystem::path(path).extension() != ".safetensors") {
    std::ifstream in(path, std::ios::binary);
    if (!in) fail_format(path, ": cannot be opened");
    const std::string content{std::istreambuf_iterator<char>(in), {}};
    return numbers_in(content, path);
  }
  if (const Safetensors file(path); file.contains("token_ids")) {
    const auto ids = file.at("token_ids").as<index_t>();
    return {ids.begin(), ids.end()};
  }
  const Tasks tasks(path);
  if (options.context < 0 || options.context >= tasks.contexts())
    fail_argument("--context ", options.context, ": ", path, " has contexts 0 to ", tasks.contexts() - 1);
  const auto context = tasks.context(options.context), continuation = tasks.continuation(options.context);
  std::vector<index_t> out(context.begin(), context.end());
  out.insert(out.end(), continuation.begin(), continuation.end());
  return out;
}

// What keys, values and queries take in the file.
std::int64_t bytes_at_least(const ModelConfig& model, const RecordCommandOptions& options, std::size_t tokens,
                            const RecordOptions& asked) {
  const auto total = static_cast<std::int64_t>(tokens);
  const std::int64_t layers = asked.layers.empty() ? model.layers : std::ssize(asked.layers);
  const std::int64_t queries =
      asked.all_queries ? total : std::min<std::int64_t>(total, total - asked.prompt_len + asked.window);
  const std::int64_t rows = 2 * model.kv_heads * total + model.q_heads * std::max<std::int64_t>(queries, 0);
  return layers * rows * model.head_dim * (options.dtype == "f32" ? 4 : 2);
}

}  // namespace

void record_dump(const Common& common, const RecordCommandOptions& options) {
  if (common.out.empty()) throw usage_error("record needs --out, the dump to write");
  require_utf8("--description", options.description);
  std::vector<std::string> inputs = files_in(options.model);
  inputs.push_back(options.tokens);
  check_outputs({{"--out", common.out}}, inputs);
  const std::vector<index_t> tokens = read_tokens(options);
  RecordOptions asked;
  asked.prompt_len = options.prompt_len;
  asked.window = options.window;
  asked.all_queries = options.all_queries;
  asked.attention_sums = options.attention_sums;
  asked.query_statistics = options.query_statistics;
  asked.output_projection = options.output_projection;
  asked.layers = numbers_in(options.layers, "--layers");
  asked.description = options.description;
  asked.model = printable(std::filesystem::path(options.model).lexically_normal().filename().string());
  const Decoder decoder(options.model);
  check_outputs({{"--out", common.out}}, {}, bytes_at_least(decoder.config(), options, tokens.size(), asked));
  if (options.dtype == "f32") record<float>(common.exec(), decoder, tokens, asked, common.out);
  else if (options.dtype == "bf16") record<bf16_t>(common.exec(), decoder, tokens, asked, common.out);
  else record<fp16_t>(common.exec(), decoder, tokens, asked, common.out);
  Common summary = common;
  summary.out.clear();
  deliver(summary,
          joined_text(printable(common.out), ": ", asked.prompt_len, " prompt and ",
                      static_cast<std::int64_t>(tokens.size()) - asked.prompt_len, " continuation rows of ",
                      asked.layers.empty() ? static_cast<std::size_t>(decoder.config().layers) : asked.layers.size(),
                      " layers\n"));
}

}  // namespace kvevict::tool
