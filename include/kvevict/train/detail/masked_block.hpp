// One block of the masked decoder (train/backward.hpp), forward and backward: the bodies of its members.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "kvevict/train/backward.hpp"

namespace kvevict::inline KVEVICT_ABI {

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::block(index_t layer, Matrix<T> x) {
  const FrozenLayer<T>& w = weights_->layer(layer);
  Layer& s = at(layer);
  const index_t rows = x.rows, hidden = config_->hidden, wide = config_->feed_forward;
  const auto copy = [](Matrix<const T> from, Matrix<T> to) { as_eigen(to) = as_eigen(from); };
  const auto input = s.input.view(rows, hidden);
  copy(x, input);
  const auto normed = normed_.view(rows, hidden), attended = attended_.view(rows, q_width());
  norm(x, w.attention_norm, normed);
  const auto q = s.q.view(rows, q_width());
  const auto k = s.k.view(rows, kv_width());
  const auto v = s.v.view(rows, kv_width());
  // Without a norm of heads their raw values are not needed again, and rotation works in place.
  const auto q_raw = w.q_norm ? s.q_raw.view(rows, q_width()) : q;
  const auto k_raw = w.k_norm ? s.k_raw.view(rows, kv_width()) : k;
  product(normed, w.q, w.q_bias, q_raw);
  product(normed, w.k, w.k_bias, k_raw);
  product(normed, w.v, w.v_bias, v);
  rotate_heads(q_raw, w.q_norm, q);
  rotate_heads(k_raw, w.k_norm, k);
  attend(layer, attended);
  product(attended, w.o, w.o_bias, x, true);

  const auto middle = s.middle.view(rows, hidden);
  copy(x, middle);
  norm(x, w.mlp_norm, normed);
  const auto gate = s.gate.view(rows, wide);
  const auto up = s.up.view(rows, wide);
  product(normed, w.gate, w.gate_bias, gate);
  product(normed, w.up, w.up_bias, up);
  const auto activated = wide_.view(rows, wide);
  for (index_t r = 0; r < rows; ++r) detail::gated_row(gate.row(r), up.row(r), wide, activated.row(r));
  product(activated, w.down, w.down_bias, x, true);
}

template <std::floating_point T, class U>
MaskedAttention<T> MaskedDecoder<T, U>::gather(index_t layer, std::size_t context, index_t head) {
  const Context& c = contexts_[context];
  const index_t d = config_->head_dim, first = first_[context], rows = first_[context + 1] - first;
  const std::int64_t at_head = (std::int64_t{layer} * config_->kv_heads + head) * c.tokens;
  const Layer& s = at(layer);
  const auto q = s.q.last(), k = s.k.last(), v = s.v.last();
  const auto queries = queries_.view(group() * rows, d);
  for (index_t g = 0; g < group(); ++g)
    for (index_t r = 0; r < rows; ++r)
      std::copy_n(q.row(first + r) + (head * group() + g) * d, d, queries.row(g * rows + r));
  MaskedAttention<T> a;
  a.queries = queries;
  a.local_keys = {k.row(first) + head * d, rows, d, k.row_stride};
  a.local_values = {v.row(first) + head * d, rows, d, v.row_stride};
  if (!c.dense.empty()) {
    a.context_keys = {a.local_keys.data, c.tokens, d, a.local_keys.row_stride};
    a.context_values = {a.local_values.data, c.tokens, d, a.local_values.row_stride};
    a.context_seen = seen_[context];
  } else {
    context_rows(c.keys + at_head * d, c.tokens, keys_, a.context_keys);
    context_rows(c.values + at_head * d, c.tokens, values_, a.context_values);
  }
  if (c.mask) a.mask = {c.mask + at_head, static_cast<std::size_t>(c.tokens)};
  a.visible = visible_[context];
  a.scale = 1 / std::sqrt(static_cast<T>(d));
  return a;
}

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::attend(index_t layer, Matrix<T> out) {
  const index_t d = config_->head_dim;
  for (std::size_t i = 0; i < contexts_.size(); ++i)
    for (index_t head = 0; head < config_->kv_heads; ++head) {
      const auto a = gather(layer, i, head);
      const auto o = outputs_.view(a.queries.rows, d);
      masked_attention(a, o, attention_);
      const index_t rows = a.queries.rows / group();
      for (index_t g = 0; g < group(); ++g)
        for (index_t r = 0; r < rows; ++r)
          std::copy_n(o.row(g * rows + r), d, out.row(first_[i] + r) + (head * group() + g) * d);
    }
}

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::attend_backward(index_t layer, Matrix<const T> dout, Matrix<T> dq, Matrix<T> dk,
                                          Matrix<T> dv) {
  const index_t d = config_->head_dim;
  const bool below = layer > 0;  // the rows of the first layer are constants
  if (below) {
    as_eigen(dk).setZero();
    as_eigen(dv).setZero();
  }
  for (std::size_t i = 0; i < contexts_.size(); ++i)
    for (index_t head = 0; head < config_->kv_heads; ++head) {
      const Context& c = contexts_[i];
      // The forward pass once more: cheaper than keeping the exponentials of all heads.
      const auto a = gather(layer, i, head);
      const index_t all = a.queries.rows, rows = all / group(), first = first_[i];
      const auto o = outputs_.view(all, d), go = grad_outputs_.view(all, d), gq = grad_queries_.view(all, d);
      masked_attention(a, o, attention_);
      for (index_t g = 0; g < group(); ++g)
        for (index_t r = 0; r < rows; ++r)
          std::copy_n(dout.row(first + r) + (head * group() + g) * d, d, go.row(g * rows + r));
      MaskedAttentionGradients<T> grads;
      if (c.grad_mask)
        grads.mask = {c.grad_mask + (std::int64_t{layer} * config_->kv_heads + head) * c.tokens,
                      static_cast<std::size_t>(c.tokens)};
      if (below) {
        as_eigen(gq).setZero();
        grads.queries = gq;
        grads.local_keys = {dk.row(first) + head * d, rows, d, dk.row_stride};
        grads.local_values = {dv.row(first) + head * d, rows, d, dv.row_stride};
        if (!c.dense.empty()) {
          grads.context_keys = {grads.local_keys.data, c.tokens, d, dk.row_stride};
          grads.context_values = {grads.local_values.data, c.tokens, d, dv.row_stride};
        }
      }
      masked_attention_backward<T>(a, o, go, attention_, grads);
      if (!below) continue;
      for (index_t g = 0; g < group(); ++g)
        for (index_t r = 0; r < rows; ++r)
          std::copy_n(gq.row(g * rows + r), d, dq.row(first + r) + (head * group() + g) * d);
    }
}

template <std::floating_point T, class U>
void MaskedDecoder<T, U>::block_backward(index_t layer, double beta) {
  const FrozenLayer<T>& w = weights_->layer(layer);
  const Layer& s = at(layer);
  const Matrix<T> gate = s.gate.last(), up = s.up.last();  // become their own gradients
  const index_t rows = final_.rows, hidden = config_->hidden, wide = config_->feed_forward;
  const auto dx = grad_.view(rows, hidden), dn = grad_normed_.view(rows, hidden), da = wide_.view(rows, wide);
  for (std::size_t i = 0; i < contexts_.size(); ++i)
    for (const ScoredRow<T>& row : contexts_[i].scored) {
      const index_t r = first_row(i) + row.row;
      const auto factor = static_cast<T>(2 * beta * row.weight / config_->layers / hidden);
      detail::RowMap<T>(dx.row(r), hidden) +=
          factor * (detail::ConstRowMap<T>(this->hidden(layer, r), hidden) -
                    detail::ConstRowMap<T>(row.teacher + std::int64_t{layer} * hidden, hidden));
    }
  product_backward(dx, w.down, da, false);
  for (index_t r = 0; r < rows; ++r) detail::gated_row_backward(gate.row(r), up.row(r), wide, da.row(r));
  product_backward(gate, w.gate, dn, false);
  product_backward(up, w.up, dn, true);
  norm_backward(s.middle.last(), w.mlp_norm, dn, dx);

  const auto dattended = attended_.view(rows, q_width()), dq = grad_q_.view(rows, q_width()),
             dk = grad_k_.view(rows, kv_width()), dv = grad_v_.view(rows, kv_width());
  product_backward(dx, w.o, dattended, false);
  attend_backward(layer, dattended, dq, dk, dv);
  if (layer == 0) return;
  rotate_heads_backward((w.q_norm ? s.q_raw : s.q).last(), w.q_norm, dq);
  rotate_heads_backward((w.k_norm ? s.k_raw : s.k).last(), w.k_norm, dk);
  product_backward(dq, w.q, dn, false);
  product_backward(dk, w.k, dn, true);
  product_backward(dv, w.v, dn, true);
  norm_backward(s.input.last(), w.attention_norm, dn, dx);
}

}  // namespace kvevict::inline KVEVICT_ABI
