// Gradients of the frozen decoder with respect to soft masks on cached rows: how LKV is trained (arXiv 2605.06676).
// Keys and values of a context are constants, made by an ordinary prefill; the texts that follow it run through the
// decoder with masked attention on the context, in one packed batch. A dense context runs through the decoder as well:
// each of its rows sees the masked rows before it and itself unmasked, and its keys and values carry gradients. The
// loss compares with a teacher at scored rows:
//
//   sum over scored rows of weight * (KL(teacher || student) + beta / layers * sum_l mean_c (student_lc -
//   teacher_lc)^2)
//
// where _l is the residual stream after block l, before the final norm. Gradients go back to the activations of the
// packed rows and from there to the masks; no weight gets one. Templated on the scalar, so that double can be checked
// against finite differences. Needs Eigen.
#pragma once
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/vector.hpp"
#include "kvevict/interop/eigen.hpp"
#include "kvevict/model/config.hpp"
#include "kvevict/model/decoder.hpp"
#include "kvevict/rope/rope_table.hpp"
#include "kvevict/train/frozen_weights.hpp"
#include "kvevict/train/masked_attention.hpp"
#include "kvevict/train/masked_context.hpp"
#include "kvevict/train/row_gradients.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Both terms of the loss, weighted; beta is not in `hidden`.
struct DistillationLoss {
  double kl = 0, hidden = 0;
};

// Buffers of a forward and backward pass, and the pass itself. One object serves one thread; its memory grows to the
// largest batch and stays. Weights and config are referred to.
template <std::floating_point T, class U = T>
class MaskedDecoder {
 public:
  using Context = MaskedContext<T, U>;

  MaskedDecoder(const ModelConfig& config, const FrozenWeights<T>& weights)
      : config_(&config), weights_(&weights), layers_(static_cast<std::size_t>(config.layers)) {}

  // Runs the texts of all contexts, and dense contexts before their texts; their rows follow one another. Contexts must
  // outlive the backward pass.
  void forward(std::span<const Context> contexts);

  // The first row of a context's texts in the batch.
  index_t first_row(std::size_t context) const noexcept {
    return first_[context] + static_cast<index_t>(contexts_[context].dense.size());
  }
  // Residual stream after `layer`, row of all contexts: [hidden].
  const T* hidden(index_t layer, index_t row) const noexcept {
    return (layer + 1 < config_->layers ? at(layer + 1).input.last() : final_).row(row);
  }
  // Logits of residual rows after the last layer, each [hidden]; the result is valid until the next call.
  Matrix<const T> logits(std::span<const T* const> rows);

  // The loss of each context of the last forward pass, [contexts], written.
  void loss(std::span<DistillationLoss> losses) { compare(losses, false); }
  // The same, and adds the gradient of sum (kl + beta * hidden) to every grad_mask. Uses up the forward pass.
  void backward(double beta, std::span<DistillationLoss> losses) {
    compare(losses, true);
    for (index_t layer = config_->layers - 1; layer >= 0; --layer) block_backward(layer, beta);
  }

 private:
  using Block = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  // What the backward pass needs of a layer.
  struct Layer {
    detail::GrowingMatrix<T> input, middle;      // [rows][hidden]: the residual stream before attention and before MLP
    detail::GrowingMatrix<T> q_raw, k_raw;       // before the norm of heads; not used where the model has none
    detail::GrowingMatrix<T> q, k, v, gate, up;  // queries and keys rotated; gate and up before the activation
  };
  Layer& at(index_t layer) noexcept { return layers_[static_cast<std::size_t>(layer)]; }
  const Layer& at(index_t layer) const noexcept { return layers_[static_cast<std::size_t>(layer)]; }
  index_t q_width() const noexcept { return config_->q_heads * config_->head_dim; }
  index_t kv_width() const noexcept { return config_->kv_heads * config_->head_dim; }
  index_t group() const noexcept { return config_->q_heads / config_->kv_heads; }
  T epsilon() const noexcept { return static_cast<T>(config_->norm_epsilon); }

  static void product(Matrix<const T> x, const FrozenMatrix<T>& w, const T* bias, Matrix<T> y, bool add = false) {
    auto out = as_eigen(y);
    if (add) out.noalias() += as_eigen(x) * w.map().transpose();
    else out.noalias() = as_eigen(x) * w.map().transpose();
    if (bias) out.rowwise() += Eigen::Map<const Eigen::Matrix<T, 1, Eigen::Dynamic>>(bias, w.outputs);
  }
  static void product_backward(Matrix<const T> dy, const FrozenMatrix<T>& w, Matrix<T> dx, bool add) {
    auto out = as_eigen(dx);
    if (add) out.noalias() += as_eigen(dy) * w.map();
    else out.noalias() = as_eigen(dy) * w.map();
  }
  void norm(Matrix<const T> x, const T* weight, Matrix<T> out) const {
    for (index_t r = 0; r < x.rows; ++r) detail::norm_row(x.row(r), weight, x.cols, epsilon(), out.row(r));
  }
  void norm_backward(Matrix<const T> x, const T* weight, Matrix<const T> dy, Matrix<T> dx) const {
    for (index_t r = 0; r < x.rows; ++r)
      detail::norm_row_backward(x.row(r), weight, x.cols, epsilon(), dy.row(r), dx.row(r), true);
  }
  // Norm of heads, where the model has it, then rotation.
  void rotate_heads(Matrix<const T> raw, const T* weight, Matrix<T> out) const {
    const index_t d = config_->head_dim;
    for (index_t r = 0; r < raw.rows; ++r)
      for (index_t c = 0; c < raw.cols; c += d) {
        if (weight) detail::norm_row(raw.row(r) + c, weight, d, epsilon(), out.row(r) + c);
        rotations_.rotate(r, out.row(r) + c);
      }
  }
  void rotate_heads_backward(Matrix<const T> raw, const T* weight, Matrix<T> grad) const {
    const index_t d = config_->head_dim;
    for (index_t r = 0; r < raw.rows; ++r)
      for (index_t c = 0; c < raw.cols; c += d) {
        T* const g = grad.row(r) + c;
        rotations_.rotate_inverse(r, g);
        if (weight) detail::norm_row_backward(raw.row(r) + c, weight, d, epsilon(), g, g, false);
      }
  }

  template <class V>
  static void repeat(std::vector<V>& rows, index_t times) {
    const std::vector<V> once = rows;
    for (index_t i = 1; i < times; ++i) rows.insert(rows.end(), once.begin(), once.end());
  }
  void block(index_t layer, Matrix<T> x);
  void block_backward(index_t layer, double beta);
  void compare(std::span<DistillationLoss> losses, bool gradients);
  // Rows of one head in the scalar of the computation, in `memory` where they have to be widened.
  void context_rows(const U* from, index_t tokens, detail::GrowingMatrix<T>& memory, Matrix<const T>& to) const {
    const index_t d = config_->head_dim;
    if constexpr (std::same_as<T, U>) {
      to = {from, tokens, d, d};
    } else {
      static_assert(std::same_as<T, float>, "narrow rows widen to float");
      const auto wide = memory.view(tokens, d);
      simd::widen_row(from, 1, tokens * d, wide.data);
      to = wide;
    }
  }
  // Attention of one (context, head) of a layer: gathers the query heads of the group.
  MaskedAttention<T> gather(index_t layer, std::size_t context, index_t head);
  void attend(index_t layer, Matrix<T> out);
  void attend_backward(index_t layer, Matrix<const T> dout, Matrix<T> dq, Matrix<T> dk, Matrix<T> dv);
  void check(std::span<const Context> contexts) const;

  const ModelConfig* config_;
  const FrozenWeights<T>* weights_;
  std::vector<Layer> layers_;
  std::span<const Context> contexts_;
  std::vector<index_t> first_, positions_;
  std::vector<std::vector<VisibleRange>> visible_;  // [context][rows of the group]
  std::vector<std::vector<index_t>> seen_;          // likewise, rows of the context; empty: all
  RopeTable<T, RopeAngle::float32> rotations_;      // [row of the packed batch]
  MaskedAttentionState<T> attention_;
  // Used forward and backward: attended_ and wide_ hold the gradients of what they held forward.
  detail::GrowingMatrix<T> final_memory_, normed_, attended_, queries_, outputs_, grad_outputs_, grad_queries_, keys_,
      values_, grad_, grad_normed_, wide_, grad_q_, grad_k_, grad_v_, scored_, logits_;
  Matrix<T> final_;
};

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::check(std::span<const Context> contexts) const {
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    const Context& c = contexts[i];
    const auto& offsets = c.branches.offsets;
    if (c.branches.tokens.empty() || offsets.size() < 2 || offsets.front() != 0 ||
        static_cast<std::size_t>(offsets.back()) != c.branches.tokens.size() ||
        !std::is_sorted(offsets.begin(), offsets.end()))
      fail_argument("MaskedDecoder: context ", i, ": branches need offsets that run from 0 to the number of tokens, ",
                    c.branches.tokens.size());
    if (!c.dense.empty() && static_cast<index_t>(c.dense.size()) != c.tokens)
      fail_argument("MaskedDecoder: context ", i, ": ", c.dense.size(), " dense tokens; it has ", c.tokens, " rows");
    for (const auto text : {c.dense, c.branches.tokens})
      for (const index_t t : text)
        if (t < 0 || t >= config_->vocabulary)
          fail_argument("MaskedDecoder: context ", i, ": token ", t, "; the vocabulary has ", config_->vocabulary);
    for (const auto& s : c.scored)
      if (s.row < 0 || s.row >= static_cast<index_t>(c.branches.tokens.size()))
        fail_argument("MaskedDecoder: context ", i, ": scored row ", s.row, " of ", c.branches.tokens.size());
  }
}

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::forward(std::span<const Context> contexts) {
  check(contexts);
  contexts_ = contexts;
  first_.assign(1, 0);
  positions_.clear();
  visible_.resize(contexts.size());
  seen_.resize(contexts.size());
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    const Context& c = contexts[i];
    const auto dense = static_cast<index_t>(c.dense.size());
    visible_[i].clear();
    seen_[i].clear();
    for (index_t t = 0; t < dense; ++t) {
      positions_.push_back(t);
      visible_[i].push_back({t, t + 1});
      seen_[i].push_back(t);
    }
    for (std::size_t b = 0; b + 1 < c.branches.offsets.size(); ++b)
      for (index_t begin = c.branches.offsets[b], t = begin; t < c.branches.offsets[b + 1]; ++t) {
        positions_.push_back(c.tokens + t - begin);
        visible_[i].push_back({dense + begin, dense + t + 1});
      }
    if (dense > 0) seen_[i].resize(visible_[i].size(), c.tokens);
    repeat(visible_[i], group());
    repeat(seen_[i], group());
    first_.push_back(static_cast<index_t>(positions_.size()));
  }
  const Rope rope = config_->rope();
  rotations_.clear();
  for (const index_t p : positions_) rotations_.add(rope, p, static_cast<double>(rope.attention_factor));
  const index_t rows = first_.back();
  final_ = final_memory_.view(rows, config_->hidden);
  index_t r = 0;
  for (const Context& c : contexts)
    for (const auto text : {c.dense, c.branches.tokens})
      for (const index_t token : text)
        std::copy_n(weights_->embedding().data + std::int64_t{token} * config_->hidden, config_->hidden,
                    final_.row(r++));
  for (index_t layer = 0; layer < config_->layers; ++layer) block(layer, final_);
}

template <std::floating_point T, class U>
Matrix<const T> MaskedDecoder<T, U>::logits(std::span<const T* const> rows) {
  const auto n = static_cast<index_t>(rows.size());
  const auto normed = scored_.view(n, config_->hidden), out = logits_.view(n, config_->vocabulary);
  for (index_t r = 0; r < n; ++r)
    detail::norm_row(rows[static_cast<std::size_t>(r)], weights_->norm(), config_->hidden, epsilon(), normed.row(r));
  product(normed, weights_->output(), nullptr, out);
  return out;
}

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::compare(std::span<DistillationLoss> losses, bool gradients) {
  if (losses.size() != contexts_.size())
    fail_argument("MaskedDecoder: ", losses.size(), " losses for ", contexts_.size(), " contexts");
  const index_t hidden = config_->hidden, last = config_->layers - 1;
  std::vector<const T*> rows;  // of the student, then of the teacher
  for (std::size_t i = 0; i < contexts_.size(); ++i)
    for (const auto& s : contexts_[i].scored) rows.push_back(final_.row(first_row(i) + s.row));
  const auto n = static_cast<index_t>(rows.size());
  for (const Context& c : contexts_)
    for (const auto& s : c.scored) rows.push_back(s.teacher + std::int64_t{last} * hidden);
  logits(rows);
  const auto z = logits_.view(2 * n, config_->vocabulary);
  if (gradients) as_eigen(grad_.view(final_.rows, hidden)).setZero();
  index_t r = 0;
  for (std::size_t i = 0; i < contexts_.size(); ++i) {
    losses[i] = {};
    for (const auto& s : contexts_[i].scored) {
      detail::RowMap<T> student(z.row(r), z.cols), teacher(z.row(n + r), z.cols);
      student -= student.maxCoeff();
      teacher -= teacher.maxCoeff();
      student -= std::log(student.exp().sum());
      teacher -= std::log(teacher.exp().sum());
      losses[i].kl += s.weight * static_cast<double>((teacher.exp() * (teacher - student)).sum());
      for (index_t l = 0; l <= last; ++l)
        losses[i].hidden += s.weight / config_->layers *
                            static_cast<double>((detail::ConstRowMap<T>(this->hidden(l, first_row(i) + s.row), hidden) -
                                                 detail::ConstRowMap<T>(s.teacher + std::int64_t{l} * hidden, hidden))
                                                    .square()
                                                    .mean());
      if (gradients) student = static_cast<T>(s.weight) * (student.exp() - teacher.exp());
      ++r;
    }
  }
  if (!gradients || n == 0) return;
  const auto dn = grad_normed_.view(n, hidden), dx = grad_.view(final_.rows, hidden);
  product_backward({z.data, n, z.cols, z.row_stride}, weights_->output(), dn, false);
  r = 0;
  for (std::size_t i = 0; i < contexts_.size(); ++i)
    for (const auto& s : contexts_[i].scored)
      detail::norm_row_backward(final_.row(first_row(i) + s.row), weights_->norm(), hidden, epsilon(), dn.row(r++),
                                dx.row(first_row(i) + s.row), true);
}

}  // namespace kvevict::inline KVEVICT_ABI

#include "kvevict/train/detail/masked_block.hpp"
