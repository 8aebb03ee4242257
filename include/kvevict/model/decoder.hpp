// A decoder of the Llama family over any growing cache: prefill, chunked prefill and decoding are one function, feed().
// Attention reads the rows that the cache holds, per head, so that evicted rows cost nothing; within a layer a new
// token sees every row before it. A sink looks into the pass: it may compact a layer's cache before the next layer
// runs.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/model/attention.hpp"
#include "kvevict/model/config.hpp"
#include "kvevict/model/elementwise.hpp"
#include "kvevict/model/packed.hpp"
#include "kvevict/model/weights.hpp"
#include "kvevict/rope/rope.hpp"
#include "kvevict/rope/rope_table.hpp"

namespace kvevict::inline KVEVICT_ABI {

// What a forward pass lets others see. A sink has any of these members; `first` counts the tokens of this feed(), and
// queries lie as [token][q_heads * head_dim]. Views are valid during the call.
//   void before_rope(index_t layer, index_t first, Matrix<const float> queries)
//   void queries(index_t layer, index_t first, Matrix<const float> queries, const float* lse)   lse [q_heads][rows]
//   void layer_done(index_t layer)                    every row of the layer is in the cache; it may be compacted now
//   void hidden(index_t layer, index_t first, Matrix<const float> rows)     the residual stream after the layer
struct NoSink {};

// Working memory of a forward pass and its outcome; reused from call to call, one call at a time.
struct ForwardState {
  index_t tokens = 0, width = 0;  // of the last call
  FloatBuffer hidden;             // [tokens][hidden]: the residual stream after the last layer

  Matrix<float> rows() noexcept { return {hidden.data(), tokens, width, width}; }
  Matrix<const float> rows() const noexcept { return {hidden.data(), tokens, width, width}; }

  FloatBuffer normed, qkv, attended, gate_up, activated, lse;  // one chunk of tokens
  RopeTable<float, RopeAngle::float32> rotations;              // [position]
  std::vector<index_t> positions;
};

// Several continuations of one cache, fed together: branch b is tokens [offsets[b], offsets[b + 1]).
struct Branches {
  std::span<const index_t> tokens, offsets;
};

class Decoder {
 public:
  static constexpr index_t default_chunk = 512;

  // Loads a Hugging Face style folder. Throws format_error naming the file and the field or tensor.
  explicit Decoder(const std::filesystem::path& folder) : config_(read_model_config(folder)) {
    weights_ = load_weights(folder, config_);
  }
  Decoder(ModelConfig config, ModelWeights weights) : config_(std::move(config)), weights_(std::move(weights)) {}

  const ModelConfig& config() const noexcept { return config_; }
  const ModelWeights& weights() const noexcept { return weights_; }
  CacheShape cache_shape() const noexcept { return config_.cache_shape(); }

  // Feeds tokens at positions cache.next_position(), ...; their rows are appended to the cache, layer by layer, `chunk`
  // tokens at a time (which bounds the working memory and changes no bit of the result). Throws std::invalid_argument
  // for token ids outside the vocabulary, positions beyond the model's limit, and a cache of another shape.
  template <GrowingCache<host_exec> Cache, class Sink = NoSink>
  requires std::same_as<typename Cache::element_type, float>
  void feed(const host_exec& exec, std::span<const index_t> tokens, Cache& cache, ForwardState& state, Sink&& sink = {},
            index_t chunk = default_chunk) const {
    if (chunk < 1) fail_argument("Decoder::feed: chunks of ", chunk, " tokens; at least 1 is required");
    const index_t start = cache.next_position();
    state.positions.clear();
    for (std::size_t i = 0; i < tokens.size(); ++i) state.positions.push_back(start + static_cast<index_t>(i));
    std::vector<Rows<const float>> keys, values;
    const auto rows = static_cast<index_t>(tokens.size());
    forward(exec, tokens, cache.shape(), state, sink, chunk,
            [&](index_t layer, index_t first, Matrix<const float> qkv, Matrix<float> out, float* lse) {
              new_rows(qkv, keys, values);
              // A prefill knows how many rows will come; short steps are better served by growth in proportion.
              if constexpr (requires { cache.reserve(layer, rows); })
                if (first == 0 && rows >= 64) cache.reserve(layer, rows);
              const auto n = static_cast<std::size_t>(qkv.rows);
              cache.append(exec, layer, keys, values,
                           std::span(state.positions).subspan(static_cast<std::size_t>(first), n));
              cache_rows(cache, layer, keys, values);
              streaming_attention(exec, cache_shape(), config_.softmax_scale(), queries_of(qkv), out, lse,
                                  AttendedRows<float>{keys, values, AttendedRows<float>::Visible::causal, {}});
            });
  }

  // Feeds every branch from the same cache, which stays as it is: tokens see the cache and the tokens of their own
  // branch before them. All branches share their matrix products.
  template <KVCacheView Cache, class Sink = NoSink>
  requires(Cache::memory_space::host) void feed_branches(const host_exec& exec, const Branches& branches,
                                                         index_t next_position, const Cache& cache, ForwardState& state,
                                                         Sink&& sink = {}) const {
    using T = typename Cache::element_type;
    check_branches(branches);
    std::vector<index_t> begin;  // of the branch that a token belongs to
    state.positions.clear();
    for (std::size_t b = 0; b + 1 < branches.offsets.size(); ++b)
      for (index_t i = branches.offsets[b]; i < branches.offsets[b + 1]; ++i) {
        begin.push_back(branches.offsets[b]);
        state.positions.push_back(next_position + i - branches.offsets[b]);
      }
    std::vector<Rows<const float>> own_keys, own_values;
    std::vector<Rows<const T>> keys, values;
    forward(exec, branches.tokens, cache.shape(), state, sink, static_cast<index_t>(branches.tokens.size()),
            [&](index_t layer, index_t, Matrix<const float> qkv, Matrix<float> out, float* lse) {
              new_rows(qkv, own_keys, own_values);
              cache_rows(cache, layer, keys, values);
              streaming_attention(
                  exec, cache_shape(), config_.softmax_scale(), queries_of(qkv), out, lse,
                  AttendedRows<T>{keys, values, AttendedRows<T>::Visible::whole, {}},
                  AttendedRows<float>{own_keys, own_values, AttendedRows<float>::Visible::local, begin});
            });
  }

  // Rows of the residual stream after the final norm, out [rows.size()][hidden]. `rows` count the tokens of the last
  // feed.
  void normed_rows(const host_exec& exec, const ForwardState& state, std::span<const index_t> rows,
                   Matrix<float> out) const {
    const auto all = state.rows();
    for (const index_t r : rows)
      if (r < 0 || r >= all.rows) fail_argument("Decoder: row ", r, " of the last feed; it had ", all.rows, " tokens");
    kernel::for_row_blocks(exec, out.rows, [&](index_t first, index_t last) {
      for (index_t r = first; r < last; ++r)
        kernel::rms_norm_row(all.row(rows[static_cast<std::size_t>(r)]), weights_.norm, config_.norm_epsilon,
                             out.row(r));
    });
  }

  // Logits of chosen tokens of the last feed, out [rows.size()][vocabulary].
  void logits(const host_exec& exec, ForwardState& state, std::span<const index_t> rows, Matrix<float> out) const {
    const auto n = static_cast<index_t>(rows.size());
    state.normed.resize(rows.size() * static_cast<std::size_t>(config_.hidden));
    const Matrix<float> normed{state.normed.data(), n, config_.hidden, config_.hidden};
    normed_rows(exec, state, rows, normed);
    weights_.logits().multiply(exec, normed, {}, out);
  }

 private:
  index_t q_width() const noexcept { return config_.q_heads * config_.head_dim; }
  index_t kv_width() const noexcept { return config_.kv_heads * config_.head_dim; }
  Matrix<const float> queries_of(Matrix<const float> qkv) const noexcept {
    return {qkv.data, qkv.rows, q_width(), qkv.row_stride};
  }

  void new_rows(Matrix<const float> qkv, std::vector<Rows<const float>>& keys,
                std::vector<Rows<const float>>& values) const {
    keys.clear(), values.clear();
    for (index_t h = 0; h < config_.kv_heads; ++h) {
      const float* k = qkv.data + q_width() + h * config_.head_dim;
      keys.push_back({k, qkv.rows, config_.head_dim, qkv.row_stride});
      values.push_back({k + kv_width(), qkv.rows, config_.head_dim, qkv.row_stride});
    }
  }
  template <class Cache, class T>
  static void cache_rows(const Cache& cache, index_t layer, std::vector<Rows<const T>>& keys,
                         std::vector<Rows<const T>>& values) {
    keys.clear(), values.clear();
    for (index_t h = 0; h < cache.shape().kv_heads; ++h) {
      keys.push_back(cache.keys(layer, h));
      values.push_back(cache.values(layer, h));
    }
  }

  void check_tokens(std::span<const index_t> tokens, const CacheShape& shape, std::span<const index_t> positions) const;
  static void check_branches(const Branches& branches);
  template <class Sink, class Attend>
  void forward(const host_exec& exec, std::span<const index_t> tokens, const CacheShape& shape, ForwardState& state,
               Sink& sink, index_t chunk, Attend&& attend_chunk) const;
  void rotate(const host_exec& exec, std::span<const index_t> positions, const ForwardState& state,
              Matrix<float> qkv) const;
  void normalise_heads(const host_exec& exec, const LayerWeights& w, Matrix<float> qkv) const;

  ModelConfig config_;
  ModelWeights weights_;
};

inline void Decoder::check_tokens(std::span<const index_t> tokens, const CacheShape& shape,
                                  std::span<const index_t> positions) const {
  const auto own = cache_shape();
  if (!(shape == own))
    fail_argument("Decoder: the cache has ", shape.layers, " layers of ", shape.kv_heads, " heads of ",
                  shape.head_dim_k, "; the model has ", own.layers, " of ", own.kv_heads, " of ", own.head_dim_k);
  if (tokens.empty()) fail_argument("Decoder: no tokens; at least 1 is required");
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= config_.vocabulary)
      fail_argument("Decoder: token ", i, " is ", tokens[i], "; the vocabulary has ", config_.vocabulary, " (0 to ",
                    config_.vocabulary - 1, ")");
  const index_t last = *std::max_element(positions.begin(), positions.end());
  if (last >= config_.most_positions)
    fail_argument("Decoder: position ", last, "; the model was made for ", config_.most_positions,
                  " positions (max_position_embeddings)");
}

inline void Decoder::check_branches(const Branches& branches) {
  const auto& o = branches.offsets;
  bool good = o.size() >= 2 && o.front() == 0 && o.back() == static_cast<index_t>(branches.tokens.size());
  for (std::size_t b = 0; good && b + 1 < o.size(); ++b) good = o[b] < o[b + 1];
  if (!good)
    fail_argument("Decoder::feed_branches: offsets from 0 to the number of tokens (", branches.tokens.size(),
                  ") are required, and at least one token a branch");
}

// q/k norm of qwen3: each head's row on its own.
inline void Decoder::normalise_heads(const host_exec& exec, const LayerWeights& w, Matrix<float> qkv) const {
  kernel::for_row_blocks(exec, qkv.rows, [&](index_t first, index_t last) {
    for (index_t r = first; r < last; ++r)
      for (index_t h = 0; h < config_.q_heads + config_.kv_heads; ++h) {
        float* x = qkv.row(r) + h * config_.head_dim;
        kernel::rms_norm_row(x, h < config_.q_heads ? w.q_norm : w.k_norm, config_.norm_epsilon, x);
      }
  });
}

inline void Decoder::rotate(const host_exec& exec, std::span<const index_t> positions, const ForwardState& state,
                            Matrix<float> qkv) const {
  kernel::for_row_blocks(exec, qkv.rows, [&](index_t first, index_t last) {
    for (index_t r = first; r < last; ++r)
      for (index_t h = 0; h < config_.q_heads + config_.kv_heads; ++h)
        state.rotations.rotate(positions[static_cast<std::size_t>(r)], qkv.row(r) + h * config_.head_dim);
  });
}

template <class Sink, class Attend>
void Decoder::forward(const host_exec& exec, std::span<const index_t> tokens, const CacheShape& shape,
                      ForwardState& state, Sink& sink, index_t chunk, Attend&& attend_chunk) const {
  check_tokens(tokens, shape, state.positions);
  const auto n = static_cast<index_t>(tokens.size());
  const index_t hidden = config_.hidden, wide = 2 * config_.feed_forward, qkv_width = q_width() + 2 * kv_width();
  chunk = std::min(chunk, n);
  const auto sized = [&](FloatBuffer& buffer, index_t rows, index_t cols) {
    buffer.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
    return Matrix<float>{buffer.data(), rows, cols, cols};
  };
  state.tokens = n, state.width = hidden;
  const auto stream = sized(state.hidden, n, hidden);
  for (index_t i = 0; i < n; ++i) weights_.embedding.row(tokens[static_cast<std::size_t>(i)], stream.row(i));
  const index_t last = *std::max_element(state.positions.begin(), state.positions.end());
  const Rope rope = config_.rope();
  while (state.rotations.rows() <= last)
    state.rotations.add(rope, state.rotations.rows(), static_cast<double>(rope.attention_factor));

  for (index_t layer = 0; layer < config_.layers; ++layer) {
    const LayerWeights& w = weights_.layers[static_cast<std::size_t>(layer)];
    for (index_t first = 0; first < n; first += chunk) {
      const index_t rows = std::min(chunk, n - first);
      const Matrix<float> x{stream.row(first), rows, hidden, hidden};
      const auto normed = sized(state.normed, rows, hidden), qkv = sized(state.qkv, rows, qkv_width),
                 attended = sized(state.attended, rows, q_width());
      kernel::rms_norm(exec, x, w.attention_norm, config_.norm_epsilon, normed);
      w.qkv.multiply(exec, normed, w.qkv_bias, qkv);
      if (config_.qk_norm) normalise_heads(exec, w, qkv);
      if constexpr (requires { sink.before_rope(layer, first, queries_of(qkv)); })
        sink.before_rope(layer, first, queries_of(qkv));
      rotate(exec, std::span(state.positions).subspan(static_cast<std::size_t>(first)), state, qkv);
      float* lse = nullptr;
      constexpr bool wants_queries = requires { sink.queries(layer, first, queries_of(qkv), lse); };
      if constexpr (wants_queries) lse = sized(state.lse, config_.q_heads, rows).data;
      attend_chunk(layer, first, qkv, attended, lse);
      if constexpr (wants_queries) sink.queries(layer, first, queries_of(qkv), lse);
      w.o.multiply(exec, attended, w.o_bias, x, true);

      const auto gate_up = sized(state.gate_up, rows, wide), activated = sized(state.activated, rows, wide / 2);
      kernel::rms_norm(exec, x, w.mlp_norm, config_.norm_epsilon, normed);
      w.gate_up.multiply(exec, normed, w.gate_up_bias, gate_up);
      kernel::gated_silu(exec, gate_up, activated);
      w.down.multiply(exec, activated, w.down_bias, x, true);
      if constexpr (requires { sink.hidden(layer, first, Matrix<const float>(x)); }) sink.hidden(layer, first, x);
    }
    if constexpr (requires { sink.layer_done(layer); }) sink.layer_done(layer);
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
