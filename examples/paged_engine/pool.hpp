// What an engine has before it knows kvevict: a pool of blocks, requests with a block table per layer, and a model.
// Everything here is the engine's own; it is kept as small as it can be.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvevict/core/half.hpp"

namespace engine {

using Element = kvevict::bf16_t;  // 16 bits of storage; an engine's own 16-bit type may be reinterpreted

struct ModelShape {
  int layers = 3, kv_heads = 2, q_heads = 4, dim = 16;
};

// Blocks of rows, [block][head][row][dim], for keys and for values. A block belongs to one layer of one request.
struct Pool {
  ModelShape model;
  int block_rows = 8;
  std::vector<Element> keys, values;
  std::vector<int> free_blocks;

  std::int64_t head_stride() const { return std::int64_t{block_rows} * model.dim; }
  std::int64_t block_stride() const { return model.kv_heads * head_stride(); }

  Pool(ModelShape m, int rows, int blocks)
      : model(m),
        block_rows(rows),
        keys(static_cast<std::size_t>(blocks * block_stride())),
        values(static_cast<std::size_t>(blocks * block_stride())) {
    for (int b = blocks - 1; b >= 0; --b) free_blocks.push_back(b);
  }
  int take() {
    if (free_blocks.empty()) throw std::runtime_error("the pool is used up");
    const int block = free_blocks.back();
    free_blocks.pop_back();
    return block;
  }
  std::size_t at(int block, int head, int row) const {
    return static_cast<std::size_t>(block * block_stride() + head * head_stride() + std::int64_t{row} * model.dim);
  }
};

// One layer of one request. Row r of head h lies in blocks[r / block_rows]; heads may have different lengths, and the
// blocks reach for the longest.
struct RequestLayer {
  std::vector<int> blocks;
  std::vector<std::vector<int>> positions;  // [head][rows of the head]: where the token of a row stood in the text
};

struct Request {
  int seed = 0;
  int next_position = 0;  // of the next token; not the number of rows
  std::vector<RequestLayer> layers;
  std::vector<int> query_positions;           // of the newest queries, ascending
  std::vector<std::vector<Element>> queries;  // [layer], each [q_head][query][dim], the newest queries after RoPE
};

// Stands in for the model: numbers that depend on what is asked alone.
inline float number(const Request& request, int layer, int what, int head, int position, int column) {
  std::uint64_t x = 0x9e3779b97f4a7c15u;
  for (const int part : {request.seed, layer, what, head, position, column})
    x = (x ^ static_cast<std::uint64_t>(part + 1)) * 0xff51afd7ed558ccdu, x ^= x >> 33;
  return static_cast<float>(x >> 40) / 8388608.f - 1.f;
}

// Appends the keys and values of positions [first, first + count) to a layer, and keeps the newest `window` queries.
// A token whose position divides by 37 is one that later queries look at.
inline void run_layer(Pool& pool, Request& request, int layer, int first, int count, int window) {
  RequestLayer& to = request.layers[static_cast<std::size_t>(layer)];
  for (int h = 0; h < pool.model.kv_heads; ++h) {
    auto& positions = to.positions[static_cast<std::size_t>(h)];
    for (int p = first; p < first + count; ++p) {
      const int row = static_cast<int>(positions.size());
      if (row / pool.block_rows == static_cast<int>(to.blocks.size())) to.blocks.push_back(pool.take());
      const std::size_t at =
          pool.at(to.blocks[static_cast<std::size_t>(row / pool.block_rows)], h, row % pool.block_rows);
      for (int c = 0; c < pool.model.dim; ++c) {
        const float looked_at = p % 37 == 0 ? 1.f : 0.f;
        const std::size_t i = at + static_cast<std::size_t>(c);
        pool.keys[i] = kvevict::from_float<Element>(looked_at + 0.3f * number(request, layer, 0, h, p, c));
        pool.values[i] = kvevict::from_float<Element>(number(request, layer, 1, h, p, c));
      }
      positions.push_back(p);
    }
  }
  auto& queries = request.queries[static_cast<std::size_t>(layer)];
  queries.clear();
  request.query_positions.clear();
  const int newest = first + count, oldest = newest > window ? newest - window : 0;
  for (int p = oldest; p < newest; ++p) request.query_positions.push_back(p);
  for (int h = 0; h < pool.model.q_heads; ++h)
    for (int p = oldest; p < newest; ++p)
      for (int c = 0; c < pool.model.dim; ++c)
        queries.push_back(kvevict::from_float<Element>(1.f + 0.3f * number(request, layer, 2, h, p, c)));
}

inline Request new_request(const Pool& pool, int seed) {
  Request out;
  out.seed = seed;
  out.layers.resize(static_cast<std::size_t>(pool.model.layers));
  out.queries.resize(out.layers.size());
  for (auto& layer : out.layers) layer.positions.resize(static_cast<std::size_t>(pool.model.kv_heads));
  return out;
}

}  // namespace engine
