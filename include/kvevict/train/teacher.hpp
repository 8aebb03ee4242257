// What the teacher, the frozen model with its full cache, says about one context of a training set: keys and values of
// the context in half precision, and the residual stream at every row that a loss will look at. Made once per context.
//
// The texts are run on the half-precision rows, by the same code as the student: a mask of ones has no loss at all.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/core/splitmix64.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/train/backward.hpp"
#include "kvevict/train/frozen_weights.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A text that follows a context; its rows from first_scored on are compared.
struct TeacherText {
  std::vector<index_t> tokens;
  index_t first_scored = 0;
  std::span<const float> hidden;  // [scored][layers][hidden]

  index_t scored() const noexcept { return static_cast<index_t>(tokens.size()) - first_scored; }
};

// Views point into `memory` or `file`.
struct TeacherContext {
  index_t tokens = 0;
  std::span<const fp16_t> keys, values;  // [layers][kv_heads][tokens][head_dim], keys after RoPE
  std::vector<TeacherText> probes;       // those that the full cache answers
  TeacherText continuation;

  struct Memory {
    std::vector<fp16_t> keys, values;
    std::vector<float> hidden;
  };
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Safetensors> file;

  // Residual rows of all texts, one after the other, the continuation last.
  void point_into(std::span<const float> hidden) {
    std::size_t rows = static_cast<std::size_t>(continuation.scored());
    for (const TeacherText& t : probes) rows += static_cast<std::size_t>(t.scored());
    const std::size_t stride = rows == 0 ? 0 : hidden.size() / rows;
    std::size_t at = 0;
    const auto take = [&](TeacherText& t) {
      t.hidden = hidden.subspan(at, static_cast<std::size_t>(t.scored()) * stride);
      at += t.hidden.size();
    };
    for (TeacherText& t : probes) take(t);
    take(continuation);
  }
};

// One at a time.
class LkvTeacher {
 public:
  explicit LkvTeacher(const std::filesystem::path& folder)
      : decoder_(folder), weights_(folder, decoder_.config()), student_(decoder_.config(), weights_) {}
  LkvTeacher(const LkvTeacher&) = delete;
  LkvTeacher& operator=(const LkvTeacher&) = delete;

  const ModelConfig& config() const noexcept { return decoder_.config(); }
  const FrozenWeights<float>& weights() const noexcept { return weights_; }

  // Differs between models, as far as their sizes, their final norm and their first embeddings do.
  std::uint64_t fingerprint() const {
    std::uint64_t hash = static_cast<std::uint64_t>(config().layers);
    const auto add = [&](const float* x, index_t count) {
      for (index_t i = 0; i < count; ++i) hash = detail::splitmix64(hash ^ std::bit_cast<std::uint32_t>(x[i]));
    };
    add(weights_.norm(), config().hidden);
    add(weights_.embedding().data, config().hidden);
    add(weights_.layer(config().layers - 1).down.data, config().feed_forward);
    return hash;
  }

  // continuation: tokens of it that are fed. Throws format_error where the model has not enough positions.
  TeacherContext context(const host_exec& exec, const Tasks& tasks, index_t context, index_t continuation);

 private:
  bool answers(index_t row, const Probe& probe);

  Decoder decoder_;
  FrozenWeights<float> weights_;
  MaskedDecoder<float, fp16_t> student_;
  ForwardState state_;
};

// row: of the last forward pass, where the first token of the answer is predicted.
inline bool LkvTeacher::answers(index_t row, const Probe& probe) {
  std::vector<const float*> rows;
  for (std::size_t i = 0; i < probe.answer.size(); ++i)
    rows.push_back(student_.hidden(config().layers - 1, row + static_cast<index_t>(i)));
  const auto logits = student_.logits(rows);
  for (std::size_t i = 0; i < probe.answer.size(); ++i) {
    const float* x = logits.row(static_cast<index_t>(i));
    if (std::max_element(x, x + logits.cols) - x != probe.answer[i]) return false;
  }
  return true;
}

inline TeacherContext LkvTeacher::context(const host_exec& exec, const Tasks& tasks, index_t context,
                                          index_t continuation) {
  const auto tokens = tasks.context(context);
  const CacheShape shape = decoder_.cache_shape();
  TeacherContext out;
  out.tokens = static_cast<index_t>(tokens.size());
  out.memory = std::make_unique<TeacherContext::Memory>();
  auto& memory = *out.memory;

  std::vector<const Probe*> asked;
  std::vector<TeacherText> texts;
  for (const Probe& p : tasks.probes(context)) {
    if (p.full == Probe::FullCache::fails) continue;
    TeacherText& t = texts.emplace_back();
    t.tokens.assign(p.question.begin(), p.question.end());
    t.first_scored = static_cast<index_t>(t.tokens.size()) - 1;
    t.tokens.insert(t.tokens.end(), p.answer.begin(), p.answer.end() - 1);
    asked.push_back(&p);
  }
  const auto next = tasks.continuation(context);
  out.continuation.tokens.assign(next.begin(), next.begin() + std::min<std::ptrdiff_t>(std::ssize(next), continuation));
  texts.push_back(std::move(out.continuation));

  std::size_t longest = 0;
  std::vector<index_t> fed, offsets{0};
  for (const TeacherText& t : texts) {
    longest = std::max(longest, t.tokens.size());
    fed.insert(fed.end(), t.tokens.begin(), t.tokens.end());
    offsets.push_back(static_cast<index_t>(fed.size()));
  }
  if (out.tokens + static_cast<std::int64_t>(longest) > config().most_positions)
    fail_format(tasks.name(), ": context ", context, " and what follows it take ", tokens.size() + longest,
                " positions; the model has ", config().most_positions);

  RaggedCache<float> cache(shape);
  decoder_.feed(exec, tokens, cache, state_);
  const auto narrow = [](const Rows<const float>& rows, std::vector<fp16_t>& to) {
    for (std::int64_t r = 0; r < rows.rows; ++r)
      for (index_t c = 0; c < rows.cols; ++c) to.push_back(from_float<fp16_t>(rows.at(r, c)));
  };
  for (auto* to : {&memory.keys, &memory.values})
    to->reserve(static_cast<std::size_t>(shape.heads_total()) * tokens.size() *
                static_cast<std::size_t>(shape.head_dim_k));
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      narrow(cache.keys(l, h), memory.keys);
      narrow(cache.values(l, h), memory.values);
    }

  out.keys = memory.keys;
  out.values = memory.values;

  MaskedContext<float, fp16_t> masked;
  masked.tokens = out.tokens;
  masked.keys = out.keys.data();
  masked.values = out.values.data();
  masked.branches = {fed, offsets};
  student_.forward(std::span(&masked, 1));
  const auto width = static_cast<std::size_t>(config().hidden);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    TeacherText& t = texts[i];
    if (i < asked.size() && asked[i]->full == Probe::FullCache::unchecked &&
        !answers(offsets[i] + t.first_scored, *asked[i]))
      continue;
    for (index_t r = t.first_scored; r < static_cast<index_t>(t.tokens.size()); ++r)
      for (index_t l = 0; l < shape.layers; ++l) {
        const float* h = student_.hidden(l, offsets[i] + r);
        memory.hidden.insert(memory.hidden.end(), h, h + width);
      }
    if (i < asked.size()) out.probes.push_back(std::move(t));
    else out.continuation = std::move(t);
  }
  out.point_into(memory.hidden);
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
