// Evaluation tasks (`kvevict-tasks`, version 1; docs/file-formats.md): contexts, probes that ask about them (question
// and answer) and the text that really follows, as token ids.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A question about a context. Spans point into the file.
struct Probe {
  enum class FullCache { unchecked = -1, fails = 0, answers = 1 };

  index_t context = 0, kind = 0;
  std::span<const index_t> question, answer;
  FullCache full = FullCache::unchecked;  // whether the model answers it with the full cache
};

// Reads and validates a whole task file, which stays mapped.
class Tasks {
 public:
  // Throws format_error that names file, tensor and entry.
  explicit Tasks(const std::filesystem::path& path) : file_(path) {
    const Metadata meta(file_);
    meta.require_format("kvevict-tasks", "1");
    read_kinds(meta.text("kinds"));
    contexts_ = ragged("ctx_tokens", "ctx_offsets", "a context");
    const auto& continuation = file_.at("cont_tokens");
    require_shape(continuation, {std::ssize(contexts_), -1});
    continuation_ = tokens_of(continuation);
    continuation_len_ = static_cast<std::size_t>(continuation.shape[1]);
    if (continuation_len_ < 2)
      fail_format(continuation.where, ": ", continuation_len_,
                  " tokens per context; at least 2 are required, as the first is not affected by eviction");
    read_probes();
  }

  const std::string& name() const noexcept { return file_.name(); }
  // The model whose tokens these are; may be empty.
  std::string model() const { return Metadata(file_).text_or("model", ""); }
  const std::vector<std::string>& kinds() const noexcept { return kinds_; }

  index_t contexts() const noexcept { return static_cast<index_t>(contexts_.size()); }
  std::span<const index_t> context(index_t c) const { return contexts_[static_cast<std::size_t>(c)]; }
  // The tokens that follow a context; the first of them is predicted by the context itself.
  std::span<const index_t> continuation(index_t c) const {
    return continuation_.subspan(static_cast<std::size_t>(c) * continuation_len_, continuation_len_);
  }
  // Probes of a context, in the order of the file.
  std::span<const Probe> probes(index_t c) const {
    const auto of_context = std::equal_range(probes_.begin(), probes_.end(), Probe{c, 0, {}, {}},
                                             [](const Probe& a, const Probe& b) { return a.context < b.context; });
    return {of_context.first, of_context.second};
  }

  // Throws format_error naming the first token id that a model with this vocabulary does not know. O(tokens).
  void check_vocabulary(index_t vocabulary) const {
    for (const char* name : {"ctx_tokens", "cont_tokens", "q_tokens", "a_tokens"}) {
      const auto& tensor = file_.at(name);
      const auto tokens = tensor.as<index_t>();
      for (std::size_t i = 0; i < tokens.size(); ++i)
        if (tokens[i] >= vocabulary)
          fail_format(tensor.where, ": entry ", i, " is ", tokens[i], "; the model's vocabulary has ", vocabulary,
                      " tokens (0 to ", vocabulary - 1, ')');
    }
  }

 private:
  void read_kinds(std::string_view names) {
    for (;;) {
      const auto comma = names.find(',');
      kinds_.emplace_back(names.substr(0, comma));
      if (comma == names.npos) return;
      names.remove_prefix(comma + 1);
    }
  }

  static std::span<const index_t> tokens_of(const TensorView& tensor) {
    const auto tokens = tensor.as<index_t>();
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i] < 0)
        fail_format(tensor.where, ": entry ", i, " is ", tokens[i], "; token ids from 0 on are required");
    return tokens;
  }

  // Pieces of `tokens_name`, cut at `offsets_name`; `what` one piece is. None may be empty.
  std::vector<std::span<const index_t>> ragged(const char* tokens_name, const char* offsets_name,
                                               std::string_view what) const {
    const auto& tensor = file_.at(tokens_name);
    require_shape(tensor, {-1});
    const auto tokens = tokens_of(tensor);
    const auto& cuts = file_.at(offsets_name);
    require_shape(cuts, {-1});
    const auto offsets = cuts.as<index_t>();
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != std::ssize(tokens))
      fail_format(cuts.where, ": offsets from 0 to ", tokens.size(), ", the number of ", tokens_name, ", are required");
    std::vector<std::span<const index_t>> out;
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
      if (offsets[i + 1] < offsets[i] || offsets[i + 1] > std::ssize(tokens))
        fail_format(cuts.where, ": entry ", i + 1, " is ", offsets[i + 1], "; ", offsets[i], " to ", tokens.size(),
                    " is legal");
      if (offsets[i + 1] == offsets[i])
        fail_format(cuts.where, ": entry ", i + 1, ": ", what, " without tokens; at least 1 is required");
      out.push_back(
          tokens.subspan(static_cast<std::size_t>(offsets[i]), static_cast<std::size_t>(offsets[i + 1] - offsets[i])));
    }
    return out;
  }

  // One number per probe, from `least` to `most`.
  std::span<const index_t> per_probe(const char* name, std::int64_t count, index_t least, index_t most) const {
    const auto& tensor = file_.at(name);
    require_shape(tensor, {count});
    const auto values = tensor.as<index_t>();
    for (std::size_t p = 0; p < values.size(); ++p)
      if (values[p] < least || values[p] > most)
        fail_format(tensor.where, ": probe ", p, " has ", values[p], "; ", least, " to ", most, " is legal");
    return values;
  }

  void read_probes() {
    const auto questions = ragged("q_tokens", "q_offsets", "a question");
    const auto answers = ragged("a_tokens", "a_offsets", "an answer");
    const std::int64_t n = std::ssize(questions);
    if (std::ssize(answers) != n)
      fail_format(file_.at("a_offsets").where, ": ", answers.size(), " answers for ", n, " questions");
    const auto context = per_probe("probe_ctx", n, 0, contexts() - 1);
    const auto kind = per_probe("probe_kind", n, 0, static_cast<index_t>(kinds_.size()) - 1);
    const auto full = per_probe("probe_full_ok", n, -1, 1);
    for (std::size_t p = 0; p < questions.size(); ++p)
      probes_.push_back({context[p], kind[p], questions[p], answers[p], static_cast<Probe::FullCache>(full[p])});
    std::stable_sort(probes_.begin(), probes_.end(),
                     [](const Probe& a, const Probe& b) { return a.context < b.context; });
  }

  Safetensors file_;
  std::vector<std::string> kinds_;
  std::vector<std::span<const index_t>> contexts_;
  std::span<const index_t> continuation_;  // [contexts][continuation_len]
  std::size_t continuation_len_ = 0;
  std::vector<Probe> probes_;  // by context
};

}  // namespace kvevict::inline KVEVICT_ABI
