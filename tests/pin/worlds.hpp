// Caches to plan on: small random ones with every input that a scorer may ask for, in every layout that rows may have,
// and the recording that the repository holds. Numbers come from integers, so every compiler makes the same ones.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pin/api.hpp"

namespace pin {

class Numbers {  // splitmix64
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // About normal, in (-3.5, 3.5).
  float normal() {
    std::int64_t sum = -(std::int64_t{2} << 20);
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int64_t>(bits() >> 44);
    return static_cast<float>(sum) * (1.75f * 0x1p-20f);  // exact until the last rounding
  }
  float small_integer() { return static_cast<float>(bits() % 3) - 1.f; }

 private:
  std::uint64_t state_;
};

enum class Layout { dense, strided, transposed, blocks };

struct WorldSpec {
  std::string name;
  CacheShape shape;
  std::vector<index_t> lengths;  // [layers * kv_heads]
  Layout layout = Layout::dense;
  bool gaps = false;       // positions differ from row numbers
  bool ties = false;       // few different values, and the heads of a layer hold the same rows
  bool bare = false;       // keys, values and positions alone
  bool sums = false;       // with log-sum-exp of the window rows
  bool no_number = false;  // one NaN among the keys
};

// The arrays behind the view of one layer. The library has such an owner too; this one does not change with it.
template <class T>
struct WorldLayer {
  LayerObservation<T> view;  // the plain fields
  std::vector<Rows<const T>> keys, values, window_queries, future_queries;
  std::vector<std::span<const index_t>> positions;
  std::vector<Rows<const float>> attn_sum, q_mean, q_cov;

  LayerObservation<T> observation() const {
    LayerObservation<T> o = view;
    o.keys = keys;
    o.values = values;
    o.positions = positions;
    o.window_queries = window_queries;
    o.extras.attn_sum = attn_sum;
    o.extras.q_mean = q_mean;
    o.extras.q_cov = q_cov;
    o.extras.future_queries = future_queries;
    return o;
  }
};

template <class T>
struct World {
  std::string name;
  CacheShape shape;
  std::vector<LayerObservation<T>> observations;

  // Views point into these, so they must not move.
  std::deque<std::vector<T>> elements;
  std::deque<std::vector<float>> floats;
  std::deque<std::vector<index_t>> integers;
  std::deque<std::vector<Rows<const T>>> tables;
  std::deque<WorldLayer<T>> layers;

  World(std::string n, const CacheShape& s) : name(std::move(n)), shape(s) {}
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::vector<index_t> tokens() const {
    std::vector<index_t> out;
    for (const auto& o : observations)
      for (const auto& k : o.keys) out.push_back(static_cast<index_t>(k.rows));
    return out;
  }
  std::int64_t row_bytes() const {
    return (std::int64_t{shape.head_dim_k} + shape.head_dim_v) * static_cast<std::int64_t>(sizeof(T));
  }
  void observe_all() {
    for (const auto& layer : layers) observations.push_back(layer.observation());
  }
};

// The same rows as a cache.
template <class T, class Space = kvevict::host_space>
struct View {
  using element_type = T;
  using memory_space = Space;
  const World<T>* world;

  CacheShape shape() const { return world->shape; }
  const LayerObservation<T>& at(index_t layer) const { return world->observations[static_cast<std::size_t>(layer)]; }
  index_t tokens(index_t layer, index_t head) const { return at(layer).tokens(head); }
  Rows<const T> keys(index_t layer, index_t head) const { return at(layer).keys[static_cast<std::size_t>(head)]; }
  Rows<const T> values(index_t layer, index_t head) const { return at(layer).values[static_cast<std::size_t>(head)]; }
  std::span<const index_t> positions(index_t layer, index_t head) const {
    return at(layer).positions[static_cast<std::size_t>(head)];
  }
};

// `numbers`, [rows][cols], laid out in memory of the world. What lies between the rows is a large number, so that
// reading it shows.
template <class T>
Rows<const T> lay_out(World<T>& world, const std::vector<float>& numbers, index_t rows, index_t cols, Layout layout) {
  Rows<const T> out;
  out.rows = rows;
  out.cols = cols;
  std::size_t room = 0;
  constexpr index_t block_rows = 4;
  const index_t blocks = (rows + block_rows - 1) / block_rows;
  switch (layout) {
    case Layout::dense:
      out.row_stride = cols;
      room = numbers.size();
      break;
    case Layout::strided:
      out.row_stride = cols + 3;
      room = static_cast<std::size_t>(rows * (cols + 3));
      break;
    case Layout::transposed:
      out.row_stride = 1;
      out.col_stride = rows;
      room = numbers.size();
      break;
    case Layout::blocks:
      out.row_stride = cols + 1;
      out.block_rows = block_rows;
      out.block_stride = block_rows * (cols + 1) + 2;
      room = static_cast<std::size_t>(blocks * out.block_stride);
      break;
  }
  std::vector<T>& memory = world.elements.emplace_back(room + 1, kvevict::from_float<T>(12345.f));
  out.data = memory.data() + (layout == Layout::dense ? 0 : 1);
  if (layout == Layout::blocks) {
    std::vector<index_t>& table = world.integers.emplace_back();
    for (index_t b = 0; b < blocks; ++b) table.push_back(blocks - 1 - b);
    if (blocks > 2) std::swap(table[0], table[static_cast<std::size_t>(blocks) / 2]);
    out.blocks = table.data();
  }
  for (index_t r = 0; r < rows; ++r)
    for (index_t c = 0; c < cols; ++c)
      memory[static_cast<std::size_t>(&out.at(r, c) - memory.data())] =
          kvevict::from_float<T>(numbers[static_cast<std::size_t>(r * cols + c)]);
  return out;
}

inline std::vector<float> random_numbers(std::int64_t count, std::uint64_t seed, bool ties, float scale = 1.f) {
  Numbers numbers(seed);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) x = ties ? numbers.small_integer() : scale * numbers.normal();
  return out;
}

// Symmetric and positive semidefinite: a sum of three outer products.
inline std::vector<float> random_covariance(index_t d, std::uint64_t seed) {
  const auto n = static_cast<std::size_t>(d);
  const auto x = random_numbers(3 * std::int64_t{d}, seed, true);
  std::vector<float> out(n * n, 0.f);
  for (std::size_t k = 0; k < 3; ++k)
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < n; ++j) out[i * n + j] += x[k * n + i] * x[k * n + j] * 0.25f;
  return out;
}

template <class T>
std::unique_ptr<World<T>> make_world(const WorldSpec& spec, std::uint64_t seed) {
  constexpr index_t window_most = 40, future_rows = 5, hidden = 16;
  auto world = std::make_unique<World<T>>(spec.name, spec.shape);
  const CacheShape& s = spec.shape;
  const index_t d = s.head_dim_k;
  std::vector<float>& frequencies = world->floats.emplace_back();
  for (index_t i = 0; i < d / 2; ++i) frequencies.push_back(1.f / static_cast<float>(1 + 3 * i));
  for (index_t l = 0; l < s.layers; ++l) {
    WorldLayer<T>& layer = world->layers.emplace_back();
    layer.view.shape = s;
    layer.view.layer = l;
    layer.view.softmax_scale = 0.375f;
    const auto stream = [&](index_t item, std::uint64_t kind) {
      return seed * 1'000'003 + (static_cast<std::uint64_t>(l) * 1000 + static_cast<std::uint64_t>(item)) * 16 + kind;
    };
    std::vector<index_t> newest;
    for (index_t h = 0; h < s.kv_heads; ++h) {
      const index_t t = spec.lengths[static_cast<std::size_t>(s.at(l, h))], item = spec.ties ? 0 : h;
      auto keys = random_numbers(std::int64_t{t} * d, stream(item, 0), spec.ties);
      if (spec.no_number && l + 1 == s.layers && h == 0 && t > 3)
        keys[static_cast<std::size_t>(3 * d)] = std::numeric_limits<float>::quiet_NaN();
      layer.keys.push_back(lay_out(*world, keys, t, d, spec.layout));
      layer.values.push_back(lay_out(*world, random_numbers(std::int64_t{t} * s.head_dim_v, stream(item, 1), spec.ties),
                                     t, s.head_dim_v, spec.layout));
      std::vector<index_t>& positions = world->integers.emplace_back();
      Numbers steps(stream(h, 2));
      for (index_t r = 0, p = 0; r < t; ++r, ++p) {
        if (spec.gaps) p += static_cast<index_t>(steps.bits() % 3);
        positions.push_back(p);
      }
      layer.positions.push_back(positions);
      if (positions.size() > newest.size()) newest = positions;
    }
    if (spec.bare) continue;
    layer.view.rope = {kvevict::RopeStyle::half, d / 2 * 2, frequencies, 1.f};
    const auto most = static_cast<index_t>(newest.size()), window = std::min(window_most, most);
    layer.view.window_positions = world->integers.emplace_back(newest.end() - window, newest.end());
    std::vector<float>& means = world->floats.emplace_back();
    for (index_t q = 0; q < s.q_heads; ++q) {
      const index_t item = spec.ties ? q % s.group() : q;
      const Layout rows = spec.layout == Layout::strided ? Layout::strided : Layout::dense;
      layer.window_queries.push_back(
          lay_out(*world, random_numbers(std::int64_t{window} * d, stream(item, 3), spec.ties), window, d, rows));
      layer.future_queries.push_back(lay_out(
          *world, random_numbers(std::int64_t{future_rows} * d, stream(item, 4), spec.ties), future_rows, d, rows));
      const auto mean = random_numbers(d, stream(item, 5), spec.ties, 0.5f);
      means.insert(means.end(), mean.begin(), mean.end());
      auto& covariance = world->floats.emplace_back(random_covariance(d, stream(item, 6)));
      layer.q_cov.push_back(kvevict::dense_rows<const float>(covariance.data(), d, d));
    }
    layer.q_mean.push_back(kvevict::dense_rows<const float>(means.data(), s.q_heads, d));
    auto& sums = world->floats.emplace_back(random_numbers(std::int64_t{s.q_heads} * most, stream(0, 7), true));
    for (float& x : sums) x += 1.f;
    layer.attn_sum.push_back(kvevict::dense_rows<const float>(sums.data(), s.q_heads, most));
    layer.view.extras.o_proj =
        lay_out(*world, random_numbers(std::int64_t{hidden} * s.q_heads * s.head_dim_v, stream(0, 8), false), hidden,
                s.q_heads * s.head_dim_v, Layout::dense);
    if (spec.sums) {  // large enough to be sums of these products
      auto& lse = world->floats.emplace_back(random_numbers(std::int64_t{s.q_heads} * window, stream(0, 9), false));
      for (float& x : lse) x += 30.f;
      layer.view.extras.lse = lse;
    }
  }
  world->observe_all();
  return world;
}

// A recording with its rows as T. last: of each (layer, head) that many newest rows alone, as in a cache that was
// evicted before; empty: all.
template <class T>
std::unique_ptr<World<T>> convert_world(std::string name, const api::Recording& from,
                                        const std::vector<index_t>& last = {}) {
  auto world = std::make_unique<World<T>>(std::move(name), from.layers.front().shape);
  const CacheShape& s = world->shape;
  const auto converted = [&](const Rows<const fp16_t>& rows, std::int64_t first) {
    std::vector<T>& memory = world->elements.emplace_back();
    for (std::int64_t r = first; r < rows.rows; ++r)
      for (index_t c = 0; c < rows.cols; ++c) memory.push_back(kvevict::from_float<T>(to_float(rows.at(r, c))));
    return kvevict::dense_rows<const T>(memory.data(), rows.rows - first, rows.cols);
  };
  for (const auto& o : from.layers) {
    WorldLayer<T>& layer = world->layers.emplace_back();
    layer.view.shape = s;
    layer.view.layer = o.layer;
    layer.view.softmax_scale = o.softmax_scale;
    layer.view.rope = o.rope;
    layer.view.window_positions = o.window_positions;
    layer.view.extras.q_stats_first = o.extras.q_stats_first;
    for (index_t h = 0; h < s.kv_heads; ++h) {
      const auto i = static_cast<std::size_t>(h);
      const std::int64_t first = last.empty() ? 0 : o.keys[i].rows - last[static_cast<std::size_t>(s.at(o.layer, h))];
      layer.keys.push_back(converted(o.keys[i], first));
      layer.values.push_back(converted(o.values[i], first));
      layer.positions.push_back(o.positions[i].subspan(static_cast<std::size_t>(first)));
    }
    for (const auto& rows : o.window_queries) layer.window_queries.push_back(converted(rows, 0));
    for (const auto& rows : o.extras.future_queries) layer.future_queries.push_back(converted(rows, 0));
    layer.attn_sum.assign(o.extras.attn_sum.begin(), o.extras.attn_sum.end());
    layer.q_mean.assign(o.extras.q_mean.begin(), o.extras.q_mean.end());
    layer.q_cov.assign(o.extras.q_cov.begin(), o.extras.q_cov.end());
    if (o.extras.o_proj.data != nullptr) layer.view.extras.o_proj = converted(o.extras.o_proj, 0);
  }
  world->observe_all();
  return world;
}

// The synthetic worlds.
inline std::vector<WorldSpec> world_specs() {
  const CacheShape small{3, 2, 6, 16, 12}, odd{2, 3, 3, 13, 7}, wide{2, 2, 4, 64, 64};
  const std::vector<index_t> ragged{60, 44, 31, 60, 52, 7};
  std::vector<WorldSpec> out;
  out.push_back({.name = "equal", .shape = small, .lengths = std::vector<index_t>(6, 97)});
  out.push_back({.name = "ragged", .shape = small, .lengths = ragged});
  out.push_back({.name = "tiny", .shape = small, .lengths = {1, 1, 0, 2, 1, 3}});
  out.push_back({.name = "empty", .shape = small, .lengths = {0, 0, 70, 33, 0, 5}});
  out.push_back({.name = "strided", .shape = odd, .lengths = {50, 83, 12, 64, 64, 64}, .layout = Layout::strided});
  out.push_back({.name = "transposed", .shape = small, .lengths = ragged, .layout = Layout::transposed});
  out.push_back({.name = "blocks", .shape = wide, .lengths = {75, 130, 128, 3}, .layout = Layout::blocks});
  out.push_back({.name = "gaps", .shape = small, .lengths = ragged, .gaps = true});
  out.push_back({.name = "ties", .shape = small, .lengths = std::vector<index_t>(6, 80), .ties = true});
  out.push_back({.name = "bare", .shape = small, .lengths = ragged, .bare = true});
  out.push_back({.name = "sums", .shape = wide, .lengths = {90, 90, 41, 90}, .sums = true});
  out.push_back({.name = "nan", .shape = small, .lengths = ragged, .no_number = true});
  out.push_back({.name = "long", .shape = {1, 2, 4, 64, 64}, .lengths = {1500, 1311}});
  return out;
}

}  // namespace pin
