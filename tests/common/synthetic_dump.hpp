// Small dumps with reproducible numbers, for tests that need a whole recording.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/dump_info.hpp"
#include "kvevict/io/dump_writer.hpp"

namespace kvevict::testing {

struct SyntheticDump {
  CacheShape shape{2, 2, 4, 8, 8};
  index_t prompt_len = 24, continuation_len = 4, prompt_queries = 6, first_position = 0;
  bool extras = true;  // attn_sum, q_mean, q_cov, o_proj
  std::uint64_t seed = 1;

  // Numbers in [-1, 1) that depend on seed, stream and place alone.
  float value(std::uint64_t stream, std::uint64_t i) const {
    std::uint64_t z = (seed << 48) + (stream << 32) + i + 0x9e3779b97f4a7c15u;  // splitmix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<float>(static_cast<std::int64_t>((z ^ (z >> 31)) >> 40) - (1 << 23)) * 0x1p-23f;
  }

  DumpInfo info() const {
    DumpInfo d;
    d.model = "synthetic";
    d.description = "made for a test";
    d.shape = shape;
    d.prompt_len = prompt_len;
    d.softmax_scale = 1.f / std::sqrt(static_cast<float>(shape.head_dim_k));
    d.rope_theta = 10000;
    for (index_t i = 0; i < prompt_len + continuation_len; ++i) {
      d.positions.push_back(first_position + i);
      d.token_ids.push_back(i * 7 % 100);
      if (i >= prompt_len - prompt_queries) d.q_positions.push_back(first_position + i);
    }
    return d;
  }

  template <CacheElement T>
  std::vector<DumpLayer<T>> layers() const {
    std::vector<DumpLayer<T>> out(static_cast<std::size_t>(shape.layers));
    std::uint64_t stream = 0;
    const auto fill = [&]<class U>(std::vector<U>& to, std::int64_t n) {
      ++stream;
      for (std::int64_t i = 0; i < n; ++i) to.push_back(from_float<U>(value(stream, static_cast<std::uint64_t>(i))));
    };
    const std::int64_t kv = shape.kv_heads, q = shape.q_heads, d = shape.head_dim_k;
    for (auto& layer : out) {
      fill(layer.k, kv * (prompt_len + continuation_len) * d);
      fill(layer.v, kv * (prompt_len + continuation_len) * d);
      fill(layer.q, q * (prompt_queries + continuation_len) * d);
      if (!extras) continue;
      fill(layer.attn_sum, q * prompt_len);
      for (auto& x : layer.attn_sum) x = std::abs(x);
      fill(layer.q_mean, q * d);
      fill(layer.q_cov, q * d * d);
      fill(layer.o_proj, 16 * q * d);
    }
    return out;
  }

  template <CacheElement T>
  void write(const std::filesystem::path& path) const {
    write_dump(path, info(), layers<T>());
  }
};

}  // namespace kvevict::testing
