// A small task file whose tensors a test may change before it is written.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/shape.hpp"
#include "kvevict/io/safetensors.hpp"

namespace kvevict::testing {

struct TaskFile {
  struct Tensor {
    std::vector<std::int64_t> shape;
    std::vector<index_t> values;
  };
  std::map<std::string, std::string> metadata = {
      {"format", "kvevict-tasks"}, {"version", "1"}, {"model", "tiny"}, {"kinds", "code,city"}};
  std::map<std::string, Tensor> tensors = {
      {"ctx_tokens", {{0}, {}}}, {"ctx_offsets", {{1}, {0}}},  {"cont_tokens", {{0, 0}, {}}}, {"probe_ctx", {{0}, {}}},
      {"probe_kind", {{0}, {}}}, {"probe_full_ok", {{0}, {}}}, {"q_tokens", {{0}, {}}},       {"q_offsets", {{1}, {0}}},
      {"a_tokens", {{0}, {}}},   {"a_offsets", {{1}, {0}}}};

  // All continuations must be of one length.
  TaskFile& context(const std::vector<index_t>& tokens, const std::vector<index_t>& continuation) {
    append_ragged("ctx_tokens", "ctx_offsets", tokens);
    Tensor& t = tensors["cont_tokens"];
    t.values.insert(t.values.end(), continuation.begin(), continuation.end());
    t.shape = {t.shape[0] + 1, static_cast<std::int64_t>(continuation.size())};
    return *this;
  }
  TaskFile& probe(index_t context, const std::vector<index_t>& question, const std::vector<index_t>& answer,
                  index_t full_ok = 1, index_t kind = 0) {
    append("probe_ctx", context);
    append("probe_kind", kind);
    append("probe_full_ok", full_ok);
    append_ragged("q_tokens", "q_offsets", question);
    append_ragged("a_tokens", "a_offsets", answer);
    return *this;
  }

  std::filesystem::path write(const std::filesystem::path& path) const {
    SafetensorsWriter file;
    for (const auto& [key, value] : metadata) file.metadata(key, value);
    for (const auto& [name, t] : tensors) file.add(name, t.shape, std::span<const index_t>(t.values));
    file.write(path);
    return path;
  }

 private:
  void append(const std::string& name, index_t value) {
    tensors[name].values.push_back(value);
    ++tensors[name].shape[0];
  }
  void append_ragged(const std::string& tokens, const std::string& offsets, const std::vector<index_t>& values) {
    for (const index_t v : values) append(tokens, v);
    append(offsets, static_cast<index_t>(tensors[tokens].values.size()));
  }
};

}  // namespace kvevict::testing
