// The student of LKV training: a few contexts whose rows carry the masks that the present weights of LKV-H and LKV-T
// give them, run against their teachers. With noise and a temperature the masks are soft and gradients come back; hard
// masks are those of inference.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/token_input.hpp"
#include "kvevict/lkv/soft_topk.hpp"
#include "kvevict/train/backward.hpp"
#include "kvevict/train/lkv_parameters.hpp"
#include "kvevict/train/noise.hpp"
#include "kvevict/train/teacher.hpp"
#include "kvevict/train/token_gradient.hpp"

namespace kvevict::inline KVEVICT_ABI {

// One context of a step.
struct StudentTask {
  const TeacherContext* teacher = nullptr;
  std::span<const index_t> dense;   // the context's tokens, where their queries see the mask too
  index_t probe = -1;               // of the teacher's; -1: the continuation alone
  double weight = 1;                // of this context in the loss
  std::uint64_t noise_counter = 0;  // where its noise begins; takes heads * tokens numbers
  std::vector<double> ratios;       // [heads]: retention of each head

  // Results.
  std::vector<double> grad_ratios;  // [heads]
  DistillationLoss loss;            // weighted
  double score_deviation = 0;       // standard deviation of raw scores, mean over heads
  index_t empty_heads = 0;          // that would keep no row
};

// How masks are made.
struct StudentMasks {
  SoftThreshold threshold = SoftThreshold::laplace;
  double temperature = 1;
  const CounterRandom* noise = nullptr;  // null: none
};

// Serves one thread; memory grows to the largest group of contexts and stays.
class LkvStudent {
 public:
  LkvStudent(const LkvTeacher& teacher, const LkvLayout& layout, const InputScale& scale,
             const InverseRotation& inverse_rotation)
      : layout_(layout),
        scale_(&scale),
        inverse_rotation_(&inverse_rotation),
        decoder_(teacher.config(), teacher.weights()) {}

  // One forward and backward pass. Adds the gradients of LKV-T to `gradients` (laid out as parameters) and fills in the
  // results of each task.
  void train(std::span<const float> parameters, const StudentMasks& how, double beta, std::span<StudentTask> tasks,
             std::span<float> gradients) {
    prepare(tasks);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      score(parameters, tasks[i], memory_[i]);
      soften(how, tasks[i], memory_[i]);
    }
    decoder_.forward(contexts_);
    losses_.resize(tasks.size());
    decoder_.backward(beta, losses_);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      tasks[i].loss = losses_[i];
      gradient(parameters, how, tasks[i], memory_[i], gradients);
    }
  }

  // The losses of inference: of each head the floor(ratio * tokens) rows with the best scores.
  void measure(std::span<const float> parameters, std::span<StudentTask> tasks) {
    prepare(tasks);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      score(parameters, tasks[i], memory_[i]);
      harden(tasks[i], memory_[i]);
    }
    decoder_.forward(contexts_);
    losses_.resize(tasks.size());
    decoder_.loss(losses_);
    for (std::size_t i = 0; i < tasks.size(); ++i) tasks[i].loss = losses_[i];
  }

  // Inputs of one head, [tokens][inputs], unscaled; written.
  static void inputs(const LkvSizes& sizes, const TeacherContext& context, std::int64_t head,
                     const InverseRotation& inverse_rotation, std::vector<index_t>& positions, float* out) {
    positions.resize(static_cast<std::size_t>(context.tokens));
    std::iota(positions.begin(), positions.end(), 0);
    const TokenFrame frame{sizes.input, &inverse_rotation, context.tokens - 1};
    const std::int64_t at = head * context.tokens;
    token_inputs(dense_rows(context.keys.data() + at * sizes.head_dim_k, context.tokens, sizes.head_dim_k),
                 dense_rows(context.values.data() + at * sizes.head_dim_v, context.tokens, sizes.head_dim_v),
                 std::span<const index_t>(positions), frame, 0, context.tokens, out);
  }

 private:
  // Buffers of one context.
  struct Memory {
    detail::GrowingMatrix<float> inputs, scores, noisy, mask, grad_mask;
    Matrix<float> x, u, v, m, g;  // x: [heads * tokens][inputs], the others [heads][tokens]
    std::vector<TokenNetState<float>> states;
    std::vector<double> thresholds;
    std::vector<index_t> tokens, offsets;
  };

  std::size_t heads() const noexcept { return static_cast<std::size_t>(layout_.sizes().heads()); }

  void prepare(std::span<const StudentTask> tasks) {
    if (memory_.size() < tasks.size()) memory_.resize(tasks.size());
    contexts_.clear();
    const auto all = static_cast<index_t>(heads());
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const StudentTask& task = tasks[i];
      const TeacherContext& t = *task.teacher;
      Memory& m = memory_[i];
      m.x = m.inputs.view(all * t.tokens, layout_.sizes().token_inputs());
      m.u = m.scores.view(all, t.tokens);
      m.v = m.noisy.view(all, t.tokens);
      m.m = m.mask.view(all, t.tokens);
      m.g = m.grad_mask.view(all, t.tokens);
      std::fill_n(m.g.data, static_cast<std::size_t>(all) * static_cast<std::size_t>(t.tokens), 0.f);
      m.states.resize(heads());
      m.thresholds.resize(heads());

      MaskedContext<float, fp16_t>& c = contexts_.emplace_back();
      c.tokens = t.tokens;
      c.keys = t.keys.data();
      c.values = t.values.data();
      c.dense = task.dense;
      c.mask = m.m.data;
      c.grad_mask = m.g.data;
      m.tokens.clear();
      m.offsets.assign(1, 0);
      const TeacherText* probe = task.probe < 0 ? nullptr : &t.probes[static_cast<std::size_t>(task.probe)];
      const double share = probe ? 0.5 : 1;
      if (probe) add(*probe, share * task.weight, m, c);
      add(t.continuation, share * task.weight, m, c);
      c.branches = {m.tokens, m.offsets};
    }
  }
  void add(const TeacherText& text, double weight, Memory& m, MaskedContext<float, fp16_t>& c) const {
    const auto first = static_cast<index_t>(m.tokens.size()), scored = text.scored();
    m.tokens.insert(m.tokens.end(), text.tokens.begin(), text.tokens.end());
    m.offsets.push_back(static_cast<index_t>(m.tokens.size()));
    const std::size_t stride = text.hidden.size() / static_cast<std::size_t>(scored);
    for (index_t i = 0; i < scored; ++i)
      c.scored.push_back(
          {first + text.first_scored + i, weight / scored, text.hidden.data() + static_cast<std::size_t>(i) * stride});
  }

  Matrix<const float> head_inputs(const Memory& m, std::size_t head) const {
    const auto tokens = m.u.cols;
    return {m.x.row(static_cast<index_t>(head) * tokens), tokens, m.x.cols, m.x.cols};
  }

  void score(std::span<const float> parameters, StudentTask& task, Memory& m) {
    const auto width = static_cast<std::size_t>(m.x.cols);
    double deviation = 0;
    task.empty_heads = 0;
    for (std::size_t h = 0; h < heads(); ++h) {
      float* const x = m.x.row(static_cast<index_t>(h) * m.u.cols);
      inputs(layout_.sizes(), *task.teacher, static_cast<std::int64_t>(h), *inverse_rotation_, positions_, x);
      const float *mean = scale_->mean.data() + h * width, *inverse = scale_->inverse.data() + h * width;
      for (index_t t = 0; t < m.u.cols; ++t)
        for (std::size_t i = 0; i < width; ++i) {
          float& v = x[static_cast<std::size_t>(t) * width + i];
          v = (v - mean[i]) * inverse[i];
        }
      const std::span<float> u(m.u.row(static_cast<index_t>(h)), static_cast<std::size_t>(m.u.cols));
      token_net_forward<float>(layout_.token_net(parameters.data(), static_cast<std::int64_t>(h)), head_inputs(m, h),
                               m.states[h], u);
      double sum = 0, square = 0;
      for (const float s : u) {
        sum += static_cast<double>(s);
        square += static_cast<double>(s) * static_cast<double>(s);
      }
      if (!std::isfinite(square)) {
        const auto at = static_cast<index_t>(h);
        fail_domain("scores of lkv_t, layer ", at / layout_.sizes().kv_heads, ", head ", at % layout_.sizes().kv_heads,
                    ", are not finite");
      }
      const auto n = static_cast<double>(u.size());
      deviation += std::sqrt(std::max(0.0, square / n - sum / n * (sum / n)));
      task.empty_heads += task.ratios[h] * n < 1;
    }
    task.score_deviation = deviation / static_cast<double>(heads());
  }

  void soften(const StudentMasks& how, const StudentTask& task, Memory& m) {
    const auto n = static_cast<std::size_t>(m.u.cols);
    scratch_.resize(soft_topk_scratch(n));
    for (std::size_t h = 0; h < heads(); ++h) {
      const auto row = static_cast<index_t>(h);
      for (std::size_t t = 0; t < n; ++t)
        m.v.row(row)[t] =
            m.u.row(row)[t] + (how.noise ? static_cast<float>(how.noise->gumbel(task.noise_counter + h * n + t)) : 0.f);
      m.thresholds[h] = soft_topk<float>({m.v.row(row), n}, task.ratios[h] * static_cast<double>(n), how.temperature,
                                         {m.m.row(row), n}, scratch_, how.threshold);
    }
  }

  void harden(const StudentTask& task, Memory& m) {
    const auto n = static_cast<std::size_t>(m.u.cols);
    std::vector<std::size_t> order(n);
    for (std::size_t h = 0; h < heads(); ++h) {
      const float* const u = m.u.row(static_cast<index_t>(h));
      float* const mask = m.m.row(static_cast<index_t>(h));
      const auto kept = std::min(n, static_cast<std::size_t>(task.ratios[h] * static_cast<double>(n)));
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                       [&](std::size_t a, std::size_t b) { return u[a] != u[b] ? u[a] > u[b] : a < b; });
      std::fill_n(mask, n, 0.f);
      for (std::size_t i = 0; i < kept; ++i) mask[order[i]] = 1.f;
    }
  }

  void gradient(std::span<const float> parameters, const StudentMasks& how, StudentTask& task, Memory& m,
                std::span<float> gradients) {
    const auto n = static_cast<std::size_t>(m.u.cols);
    task.grad_ratios.resize(heads());
    for (std::size_t h = 0; h < heads(); ++h) {
      const auto row = static_cast<index_t>(h);
      const std::span<float> g(m.g.row(row), n);
      const auto grads =
          soft_topk_backward<float>({m.v.row(row), n}, m.thresholds[h], how.temperature, g, g, how.threshold);
      const double k = task.ratios[h] * static_cast<double>(n);
      task.grad_ratios[h] = soft_topk_clamp(k, n) == k ? static_cast<double>(n) * grads.k : 0;
      token_net_backward<float>(layout_.token_net(parameters.data(), static_cast<std::int64_t>(h)), head_inputs(m, h),
                                m.states[h], g, layout_.token_net(gradients.data(), static_cast<std::int64_t>(h)));
    }
  }

  LkvLayout layout_;
  const InputScale* scale_;
  const InverseRotation* inverse_rotation_;
  MaskedDecoder<float, fp16_t> decoder_;
  std::vector<Memory> memory_;
  std::vector<MaskedContext<float, fp16_t>> contexts_;
  std::vector<DistillationLoss> losses_;
  std::vector<double> scratch_;
  std::vector<index_t> positions_;
};

}  // namespace kvevict::inline KVEVICT_ABI
