// LKV-T on the device: a small network per head over [key ; value], on the tensor cores (token_steps.hpp). Networks
// trained on keys before RoPE run in float32 on rows that are rotated back head by head. Scores agree with the host
// within 1e-5 of the head's largest. Nothing waits once the weights are there.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/cuda/detail/cta.cuh"
#include "kvevict/cuda/detail/tables.cuh"
#include "kvevict/cuda/detail/token_steps.hpp"
#include "kvevict/cuda/detail/token_weights.hpp"
#include "kvevict/cuda/exec.cuh"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/lkv_t.hpp"
#include "kvevict/lkv/token_net.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/score/check_scoring.hpp"

namespace kvevict::inline KVEVICT_ABI {
namespace cuda {
namespace kernels {

template <class T, int Blocks>
__global__ void __launch_bounds__(WalkShape::threads, 2) token_kernel(const __grid_constant__ TokenArgs<T> args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  DeviceCta cta;
  score_tokens<T, Blocks, tiles_for<T, Blocks>>(cta, args, shared_memory);
}
template <class Args>
__global__ void __launch_bounds__(256) rotations_kernel(const __grid_constant__ Args args) {
  DeviceCta cta;
  fill_rotations(cta, args);
}
template <class T>
__global__ void __launch_bounds__(256)
    widen_kernel(const __grid_constant__ Rows<const T> from, const index_t* positions, bool rotated,
                 const __grid_constant__ RotationArgs rotations, float* to) {
  DeviceCta cta;
  widen_rows(cta, from, positions, rotated ? &rotations : nullptr, to);
}

template <class T, int Blocks>
void run_tokens(const cuda_exec& exec, TokenArgs<T> args, std::int64_t longest) {
  constexpr int tiles = tiles_for<T, Blocks>, tokens_per_step = WalkShape::warps * tiles * tile_tokens;
  const WalkShape shape;
  args.steps = shape.steps(longest, args.heads, tokens_per_step);
  args.chunk_tiles = 1;
  const std::size_t one = token_shared_bytes(args, Blocks, tiles, WalkShape::warps),
                    room = static_cast<std::size_t>(shape.shared_bytes),
                    each = static_cast<std::size_t>(tile_pieces(Blocks, args.terms)) * sizeof(Piece);
  if (one > room)
    fail_argument("lkv-t: ", args.row_tiles * tile_rows, " hidden units over rows of ", Blocks * block_bytes,
                  " bytes need ", one, " bytes of shared memory; ", room, " are there");
  args.chunk_tiles =
      static_cast<int>(std::min<std::size_t>(1 + (room - one) / each, static_cast<std::size_t>(args.row_tiles)));
  const std::size_t bytes = token_shared_bytes(args, Blocks, tiles, WalkShape::warps);
  allow_shared(token_kernel<T, Blocks>, bytes);
  const auto parts = static_cast<unsigned>(ceil_div<std::int64_t>(longest, std::int64_t{args.steps} * tokens_per_step));
  token_kernel<T, Blocks>
      <<<dim3(parts, static_cast<unsigned>(args.heads)), WalkShape::threads, bytes, exec.stream>>>(args);
  check_launch("lkv-t");
}

}  // namespace kernels

// The networks of one layer on the device, for caches of T.
template <class T>
class LayerTokenNets {
 public:
  // net(head) gives a head's TokenNet<const float> in host memory. O(weights); may wait for the copy.
  template <class NetOf>
  LayerTokenNets(const cuda_exec& exec, const CacheShape& shape, TokenInput input, NetOf&& net)
      : shape_(shape), input_(input) {
    if (input.key_frame == KeyFrame::pre_rope) build<float>(exec, net);
    else build<T>(exec, net);
  }

  // out: device memory, [kv_heads][at least the most tokens of a head]. newest: position of the newest prompt row;
  // device positions cannot be read without waiting, so it is asked for with distance features or keys before RoPE.
  // rope.inv_freq is host memory.
  void score(const cuda_exec& exec, const LayerObservation<T>& o, index_t newest, Matrix<float> out) const {
    if (o.shape != shape_ || std::ssize(o.keys) != shape_.kv_heads || std::ssize(o.values) != shape_.kv_heads ||
        out.rows != shape_.kv_heads || out.cols < o.most_tokens())
      fail_argument("lkv-t: layer ", o.layer, ": keys, values and scores of ", shape_.kv_heads,
                    " heads of the networks' shape are required");
    const bool positions = input_.features == TokenFeatures::distance || input_.key_frame == KeyFrame::pre_rope;
    if (positions && (std::ssize(o.positions) != shape_.kv_heads || newest < 0))
      fail_argument("lkv-t: layer ", o.layer, ": these networks look at positions; they are not given");
    if (o.most_tokens() == 0) return;
    if (input_.key_frame == KeyFrame::pre_rope) score_before_rope(exec, o, newest, out);
    else score_rows<T>(exec, o.keys, o.values, o.positions, newest, 0, out);
  }

 private:
  template <class E, class NetOf>
  void build(const cuda_exec& exec, NetOf&& net) {
    const int own = blocks_of<E>(shape_.head_dim_k) + blocks_of<E>(shape_.head_dim_v);
    TokenWeights<E> weights;
    kernels::with_blocks("lkv-t", own, [&](auto blocks) {
      for (index_t h = 0; h < shape_.kv_heads; ++h)
        add_head(weights, net(h), shape_.head_dim_k, shape_.head_dim_v, decltype(blocks)::value);
    });
    key_blocks_ = weights.key_blocks;
    value_blocks_ = weights.value_blocks;
    row_tiles_ = weights.row_tiles;
    terms_ = weight_terms<E>;
    copy(exec, weights.pieces, pieces_);
    copy(exec, weights.hidden, hidden_);
    wait(exec);  // the host arrays end here
  }
  template <class E>
  static void copy(const cuda_exec& exec, const std::vector<E>& from, DeviceArray<E>& to) {
    to = DeviceArray<E>(exec, std::ssize(from));
    check(cudaMemcpyAsync(to.data(), from.data(), to.bytes(), cudaMemcpyHostToDevice, exec.stream), "lkv-t weights");
  }

  // Heads [first, first + keys.size()).
  template <class E>
  void score_rows(const cuda_exec& exec, std::span<const Rows<const E>> keys, std::span<const Rows<const E>> values,
                  std::span<const std::span<const index_t>> positions, index_t newest, index_t first,
                  Matrix<float> out) const {
    std::vector<const index_t*> pointers;
    for (const auto& p : positions) pointers.push_back(p.data());
    const WholeRows<E> whole_keys(exec, keys), whole_values(exec, values);
    Tables tables;
    const std::size_t k = tables.add(whole_keys.rows()), v = tables.add(whole_values.rows()),
                      p = tables.add(std::span<const index_t*const>(pointers));
    tables.send(exec);
    TokenArgs<E> args{};
    args.keys = tables.at<Rows<const E>>(k);
    args.values = tables.at<Rows<const E>>(v);
    args.positions = tables.at<const index_t*>(p);
    args.heads = static_cast<index_t>(keys.size());
    args.newest = newest;
    args.key_blocks = key_blocks_;
    args.value_blocks = value_blocks_;
    args.distance = input_.features == TokenFeatures::distance;
    args.row_tiles = row_tiles_;
    args.terms = terms_;
    args.hidden = hidden_.data() + std::int64_t{first} * row_tiles_ * tile_rows;
    args.out = out.row(first);
    args.out_stride = out.row_stride;
    std::int64_t longest = 0;
    for (const auto& rows : keys) longest = std::max(longest, rows.rows);
    if (longest == 0) return;
    kernels::with_blocks("lkv-t", key_blocks_ + value_blocks_, [&](auto blocks) {
      constexpr int count = decltype(blocks)::value;
      args.weights = pieces_.data() + std::int64_t{first} * row_tiles_ * tile_pieces(count, terms_);
      kernels::run_tokens<E, count>(exec, args, longest);
    });
  }
  // One head after the other through float32 rows of working memory.
  void score_before_rope(const cuda_exec& exec, const LayerObservation<T>& o, index_t newest, Matrix<float> out) const {
    const index_t pairs = o.rope.rotary_dim / 2, coarse_rows = newest / rotation_step + 1;
    if (pairs < 1 || o.rope.rotary_dim > shape_.head_dim_k || std::ssize(o.rope.inv_freq) != pairs)
      fail_argument("lkv-t: layer ", o.layer, ": RoPE rotates ", o.rope.rotary_dim, " values by ",
                    o.rope.inv_freq.size(), " frequencies, keys have ", shape_.head_dim_k);
    const DeviceArray<float> frequencies = uploaded(exec, o.rope.inv_freq);
    DeviceArray<float> tables(exec, 2ll * pairs * (coarse_rows + rotation_step));
    const RotationArgs rotations{frequencies.data(),
                                 pairs,
                                 o.rope.style == RopeStyle::interleaved,
                                 o.rope.attention_factor,
                                 tables.data(),
                                 tables.data() + 2ll * pairs * coarse_rows,
                                 coarse_rows};
    const auto blocks = [](std::int64_t items) { return static_cast<unsigned>(ceil_div<std::int64_t>(items, 256)); };
    kernels::rotations_kernel<<<blocks(std::int64_t{pairs} * (coarse_rows + rotation_step)), 256, 0, exec.stream>>>(
        rotations);
    DeviceArray<float> keys(exec, std::int64_t{o.most_tokens()} * packed_stride<float>(shape_.head_dim_k)),
        values(exec, std::int64_t{o.most_tokens()} * packed_stride<float>(shape_.head_dim_v));
    for (index_t h = 0; h < shape_.kv_heads; ++h) {
      const auto i = static_cast<std::size_t>(h);
      const std::int64_t tokens = o.keys[i].rows;
      if (tokens == 0) continue;
      kernels::widen_kernel<T><<<blocks(tokens * packed_stride<float>(shape_.head_dim_k)), 256, 0, exec.stream>>>(
          o.keys[i], o.positions[i].data(), true, rotations, keys.data());
      kernels::widen_kernel<T><<<blocks(tokens * packed_stride<float>(shape_.head_dim_v)), 256, 0, exec.stream>>>(
          o.values[i], o.positions[i].data(), false, rotations, values.data());
      Rows<const float> k = dense_rows<const float>(keys.data(), tokens, shape_.head_dim_k),
                        v = dense_rows<const float>(values.data(), tokens, shape_.head_dim_v);
      k.row_stride = packed_stride<float>(k.cols);
      v.row_stride = packed_stride<float>(v.cols);
      score_rows<float>(exec, std::span(&k, 1), std::span(&v, 1), o.positions.subspan(i, 1), newest, h, out);
    }
  }

  CacheShape shape_;
  TokenInput input_;
  int key_blocks_ = 0, value_blocks_ = 0, row_tiles_ = 0, terms_ = 0;
  DeviceArray<Piece> pieces_;
  DeviceArray<HiddenUnit> hidden_;
};

}  // namespace cuda

// Converts and copies the layer's weights each time, and waits for that and for the newest position where the networks
// look at it; an engine keeps a cuda::LayerTokenNets per layer instead.
template <class T>
void score_on(const cuda_exec& exec, const score::LkvT& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  const LkvCheckpoint& checkpoint = scorer.file.checkpoint(score::LkvT::name);
  checkpoint.check_fits(score::LkvT::name, o.shape);
  check_scoring(scorer, o, out);
  const TokenInput input = checkpoint.sizes().input;
  if (input.key_frame == KeyFrame::pre_rope) check_key_frame(score::LkvT::name, o);
  index_t newest = 0;
  if (input != TokenInput{})
    for (const auto& p : o.positions)
      if (!p.empty()) newest = std::max(newest, cuda::downloaded(exec, p.data() + p.size() - 1, 1).front());
  const cuda::LayerTokenNets<T> nets(exec, o.shape, input, [&](index_t h) { return checkpoint.token_net(o.layer, h); });
  nets.score(exec, o, newest, out);
}

}  // namespace kvevict::inline KVEVICT_ABI
