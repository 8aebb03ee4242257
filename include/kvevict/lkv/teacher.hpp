// What the teacher, the frozen model with its full cache, says about one context of a training set: keys and values of
// the context in half precision, and the residual stream at every row that a loss will look at. Made once per context.
//
// The texts are run on the half-precision rows, by the same code as the student: a mask of ones has no loss at all.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/model/backward.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/model/frozen_weights.hpp"

namespace kvevict {

// A text that follows a context; its rows from first_scored on are compared.
struct TeacherText {
  std::vector<index_t> tokens;
  index_t first_scored = 0;
  std::vector<float> hidden;  // [scored][layers][hidden]

  index_t scored() const noexcept { return static_cast<index_t>(tokens.size()) - first_scored; }
};

struct TeacherContext {
  index_t tokens = 0;
  std::vector<fp16_t> keys, values;  // [layers][kv_heads][tokens][head_dim], keys after RoPE
  std::vector<TeacherText> probes;   // those that the full cache answers
  TeacherText continuation;
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

  // continuation: tokens of it that are fed. Throws format_error where the model has not enough positions.
  TeacherContext context(const host_exec& exec, const Tasks& tasks, index_t context, index_t continuation);

 private:
  bool answers(std::size_t row, const Probe& probe, index_t first_scored);

  Decoder decoder_;
  FrozenWeights<float> weights_;
  MaskedDecoder<float, fp16_t> student_;
  ForwardState state_;
};

inline bool LkvTeacher::answers(std::size_t row, const Probe& probe, index_t first_scored) {
  std::vector<const float*> rows;
  for (std::size_t i = 0; i < probe.answer.size(); ++i)
    rows.push_back(student_.hidden(config().layers - 1, static_cast<index_t>(row + i) + first_scored));
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
  for (auto* to : {&out.keys, &out.values})
    to->reserve(static_cast<std::size_t>(shape.heads_total()) * tokens.size() *
                static_cast<std::size_t>(shape.head_dim_k));
  for (index_t l = 0; l < shape.layers; ++l)
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      narrow(cache.keys(l, h), out.keys);
      narrow(cache.values(l, h), out.values);
    }

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
        !answers(static_cast<std::size_t>(offsets[i]), *asked[i], t.first_scored))
      continue;
    t.hidden.reserve(static_cast<std::size_t>(t.scored()) * static_cast<std::size_t>(shape.layers) * width);
    for (index_t r = t.first_scored; r < static_cast<index_t>(t.tokens.size()); ++r)
      for (index_t l = 0; l < shape.layers; ++l) {
        const float* h = student_.hidden(l, offsets[i] + r);
        t.hidden.insert(t.hidden.end(), h, h + width);
      }
    if (i < asked.size()) out.probes.push_back(std::move(t));
    else out.continuation = std::move(t);
  }
  return out;
}

}  // namespace kvevict
