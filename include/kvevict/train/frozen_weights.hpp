// Weights of a model folder as plain row-major matrices, for products with W and with W^T: what gradients with respect
// to activations need. A float32 folder is used as it lies in the file, mapped and never copied; other types, or
// another scalar than float, are converted once.
#pragma once
#include <Eigen/Core>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/dtype.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/model/config.hpp"
#include "kvevict/model/weights.hpp"

namespace kvevict::inline KVEVICT_ABI {

template <std::floating_point T>
struct FrozenMatrix {
  using Map = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
  const T* data = nullptr;
  index_t outputs = 0, inputs = 0;

  Map map() const { return Map(data, outputs, inputs); }
};

// Pointers to vectors are null where the model has none.
template <std::floating_point T>
struct FrozenLayer {
  const T *attention_norm = nullptr, *mlp_norm = nullptr;  // [hidden]
  FrozenMatrix<T> q, k, v, o, gate, up, down;              // [outputs][inputs]
  const T *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr, *o_bias = nullptr;
  const T *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  const T *q_norm = nullptr, *k_norm = nullptr;  // [head_dim]
};

template <std::floating_point T>
class FrozenWeights {
 public:
  // Throws format_error naming file and tensor for whatever is missing or of a wrong shape.
  FrozenWeights(const std::filesystem::path& folder, const ModelConfig& c) : folder_(folder) {
    embedding_ = matrix("model.embed_tokens.weight", c.vocabulary, c.hidden);
    norm_ = vector("model.norm.weight", c.hidden);
    output_ = c.tied ? embedding_ : matrix("lm_head.weight", c.vocabulary, c.hidden);
    const index_t q = c.q_heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    for (index_t i = 0; i < c.layers; ++i) {
      const std::string p = "model.layers." + std::to_string(i) + '.', a = p + "self_attn.", m = p + "mlp.";
      FrozenLayer<T>& w = layers_.emplace_back();
      w.attention_norm = vector(p + "input_layernorm.weight", c.hidden);
      w.mlp_norm = vector(p + "post_attention_layernorm.weight", c.hidden);
      w.q = matrix(a + "q_proj.weight", q, c.hidden);
      w.k = matrix(a + "k_proj.weight", kv, c.hidden);
      w.v = matrix(a + "v_proj.weight", kv, c.hidden);
      w.o = matrix(a + "o_proj.weight", c.hidden, q);
      w.gate = matrix(m + "gate_proj.weight", c.feed_forward, c.hidden);
      w.up = matrix(m + "up_proj.weight", c.feed_forward, c.hidden);
      w.down = matrix(m + "down_proj.weight", c.hidden, c.feed_forward);
      if (c.qkv_bias) {
        w.q_bias = vector(a + "q_proj.bias", q);
        w.k_bias = vector(a + "k_proj.bias", kv);
        w.v_bias = vector(a + "v_proj.bias", kv);
      }
      if (c.o_bias) w.o_bias = vector(a + "o_proj.bias", c.hidden);
      if (c.mlp_bias) {
        w.gate_bias = vector(m + "gate_proj.bias", c.feed_forward);
        w.up_bias = vector(m + "up_proj.bias", c.feed_forward);
        w.down_bias = vector(m + "down_proj.bias", c.hidden);
      }
      if (c.qk_norm) {
        w.q_norm = vector(a + "q_norm.weight", c.head_dim);
        w.k_norm = vector(a + "k_norm.weight", c.head_dim);
      }
    }
  }

  const FrozenLayer<T>& layer(index_t i) const noexcept { return layers_[static_cast<std::size_t>(i)]; }
  const FrozenMatrix<T>& embedding() const noexcept { return embedding_; }  // [vocabulary][hidden]
  const FrozenMatrix<T>& output() const noexcept { return output_; }        // [vocabulary][hidden]
  const T* norm() const noexcept { return norm_; }                          // [hidden]

 private:
  FrozenMatrix<T> matrix(const std::string& name, index_t outputs, index_t inputs) {
    return {take(name, {outputs, inputs}), outputs, inputs};
  }
  const T* vector(const std::string& name, index_t size) { return take(name, {size}); }

  const T* take(const std::string& name, const std::vector<std::int64_t>& shape) {
    const TensorView& tensor = folder_.take(name, shape);
    if constexpr (std::same_as<T, float>) {
      if (tensor.dtype == DType::f32 && reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % alignof(float) == 0)
        return tensor.as<float>().data();
    }
    auto& wide = converted_.emplace_back();
    visit_elements(tensor, [&](auto values) {
      wide.reserve(values.size());
      for (const auto x : values) wide.push_back(static_cast<T>(to_float(x)));
    });
    return wide.data();
  }

  detail::WeightFolder folder_;
  std::vector<std::vector<T, Eigen::aligned_allocator<T>>> converted_;
  FrozenMatrix<T> embedding_, output_;
  const T* norm_ = nullptr;
  std::vector<FrozenLayer<T>> layers_;
};

}  // namespace kvevict::inline KVEVICT_ABI
