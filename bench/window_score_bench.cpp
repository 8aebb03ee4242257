// score_window/<implementation>/<tokens>: SnapKV's scores of one KV head (window 32, rows mean, max pooling 7, group
// mean), d 128, group 4, float32, without log-sum-exp, one thread. Suffixes on the operation: lse (given), f16, bf16,
// d64, w8, w64, g1, g8 (other shapes), max (group max: a sum per query head), two_passes (no memory for exponentials),
// h8 and h8.threads2 (eight heads, on one and two threads).
//   kvevict      WindowAttention
//   eigen_naive  all products in one matrix, softmax by rows, column sums; memory is reused from call to call
//   eigen_tiled  the same in tiles of 512 keys with one exp per element, weights applied at the end
//   fma_floor    the bound: the products' multiply-adds at the processor's peak, measured by independent chains
//   read_floor   the bound of memory: every key read once
#include <benchmark/benchmark.h>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/cases.hpp"
#include "common/fma_loop.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::bench {
namespace {

using Block = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using BlockMap = Eigen::Map<const Block>;

struct Point {
  index_t tokens = 0, dim = 128, window = 32, group = 4, heads = 1;

  friend bool operator==(const Point&, const Point&) = default;
  index_t rows() const { return window * group; }
  index_t past() const { return tokens - window; }
  double flops() const { return 2. * rows() * dim * tokens * heads; }
};

// Keys and queries of a point, and what the implementations need of memory.
struct Data {
  Point point;
  std::vector<float> keys, queries, lse, reference;  // [heads][tokens][dim], [heads][group][window][dim]
  std::vector<fp16_t> keys_f16, queries_f16;
  std::vector<bf16_t> keys_bf16, queries_bf16;
  std::vector<index_t> positions;
  Block products;
  Arena arena;
  std::vector<float> out;

  explicit Data(const Point& p) : point(p) {
    std::mt19937 random(1);
    std::normal_distribution<float> draw;
    const auto fill = [&](std::vector<float>& to, auto& f16, auto& bf16, index_t count) {
      for (index_t i = 0; i < count; ++i) {
        to.push_back(draw(random));
        f16.push_back(from_float<fp16_t>(to.back()));
        bf16.push_back(from_float<bf16_t>(to.back()));
      }
    };
    fill(keys, keys_f16, keys_bf16, p.heads * p.tokens * p.dim);
    fill(queries, queries_f16, queries_bf16, p.heads * p.rows() * p.dim);
    positions.resize(static_cast<std::size_t>(p.tokens));
    std::iota(positions.begin(), positions.end(), 0);
    out.resize(static_cast<std::size_t>(p.heads) * static_cast<std::size_t>(p.tokens));
    find_reference();
  }
  float scale() const { return 1.f / std::sqrt(static_cast<float>(point.dim)); }
  index_t visible(index_t row) const { return point.past() + row % point.window + 1; }

  // In float64, by tiles; the float32 rows stand for all element types.
  void find_reference() {
    using Wide = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    constexpr index_t tile = 512;
    const index_t t = point.tokens, rows = point.rows(), d = point.dim;
    for (index_t h = 0; h < point.heads; ++h) {
      const Wide q = BlockMap(queries.data() + std::ptrdiff_t{h} * rows * d, rows, d).cast<double>() *
                     static_cast<double>(scale());
      Eigen::ArrayXd mass = Eigen::ArrayXd::Zero(rows);
      Eigen::RowVectorXd sums = Eigen::RowVectorXd::Zero(t);
      for (const bool weigh : {false, true})
        for (index_t first = 0; first < t; first += tile) {
          const index_t n = std::min(tile, t - first);
          Wide s = q * BlockMap(keys.data() + (std::ptrdiff_t{h} * t + first) * d, n, d).cast<double>().transpose();
          s.array() = s.array().exp();
          for (index_t r = 0; r < rows; ++r) s.row(r).tail(n - std::clamp(visible(r) - first, 0, n)).setZero();
          if (weigh) sums.segment(first, n) = (s.array().colwise() / mass).colwise().sum() / rows;
          else mass += s.array().rowwise().sum();
        }
      for (index_t r = 0; r < rows; ++r) lse.push_back(static_cast<float>(std::log(mass[r])));
      for (index_t j = 0; j < point.past(); ++j) {
        double largest = 0;
        for (index_t i = std::max(0, j - 3); i <= std::min(point.past() - 1, j + 3); ++i)
          largest = std::max(largest, sums[i]);
        reference.push_back(static_cast<float>(largest));
      }
    }
  }

  template <class T>
  OwnedObservation<T> observed(const std::vector<T>& k, const std::vector<T>& q) const {
    const auto [t, d, window, group, heads] = point;
    OwnedObservation<T> layer;
    layer.shape = {1, heads, heads * group, d, d};
    layer.softmax_scale = scale();
    layer.window_positions = std::span(positions).last(static_cast<std::size_t>(window));
    for (index_t h = 0; h < heads; ++h) {
      layer.keys.push_back(dense_rows<const T>(k.data() + std::ptrdiff_t{h} * t * d, t, d));
      layer.positions.emplace_back(positions);
    }
    for (index_t g = 0; g < heads * group; ++g)
      layer.window_queries.push_back(dense_rows<const T>(q.data() + std::ptrdiff_t{g} * window * d, window, d));
    return layer;
  }
};

// The data of a point, made once; the cases of one point run one after the other.
Data& data_of(const Point& point) {
  static std::unique_ptr<Data> cached;
  if (!cached || !(cached->point == point)) {
    cached.reset();
    cached = std::make_unique<Data>(point);
  }
  return *cached;
}

// Max pooling and memory of one head's sums, as the scorer does it.
void pool(Data& data) {
  std::vector<float> scratch(pool_scratch(Pooling::max(7), data.out.size()));
  pool_row(Pooling::max(7), std::span(data.out).first(static_cast<std::size_t>(data.point.past())), scratch);
}

void eigen_naive(Data& data) {
  const index_t t = data.point.tokens, rows = data.point.rows(), d = data.point.dim;
  const Block q = BlockMap(data.queries.data(), rows, d) * data.scale();
  data.products.resize(rows, t);
  data.products.noalias() = q * BlockMap(data.keys.data(), t, d).transpose();
  for (index_t r = 0; r < rows; ++r) {
    auto row = data.products.row(r).head(data.visible(r)).array();
    const float largest = row.maxCoeff();
    row = (row - largest).exp();
    row /= row.sum();
  }
  Eigen::Map<Eigen::RowVectorXf>(data.out.data(), data.point.past()) =
      data.products.leftCols(data.point.past()).colwise().sum() / static_cast<float>(rows);
  pool(data);
}

void eigen_tiled(Data& data) {
  constexpr index_t tile = 512;
  const index_t t = data.point.tokens, rows = data.point.rows(), d = data.point.dim, tiles = (t + tile - 1) / tile;
  const Block q = BlockMap(data.queries.data(), rows, d) * data.scale();
  data.products.resize(rows, t);  // tile after tile: rows of a power of two would share cache sets
  const auto tile_of = [&](index_t first, index_t n) {
    return Eigen::Map<Block>(data.products.data() + std::ptrdiff_t{first} * rows, rows, n);
  };
  Eigen::ArrayXXf largest(rows, tiles), mass(rows, tiles);
  for (index_t b = 0; b < tiles; ++b) {
    const index_t first = b * tile, n = std::min(tile, t - first);
    auto s = tile_of(first, n);
    s.noalias() = q * BlockMap(data.keys.data() + std::ptrdiff_t{first} * d, n, d).transpose();
    for (index_t r = 0; r < rows; ++r) {
      const index_t seen = std::clamp(data.visible(r) - first, 0, n);
      s.row(r).tail(n - seen).setConstant(-std::numeric_limits<float>::infinity());
      largest(r, b) = seen > 0 ? s.row(r).head(seen).maxCoeff() : std::numeric_limits<float>::lowest();
      s.row(r).array() = (s.row(r).array() - largest(r, b)).exp();
      mass(r, b) = s.row(r).sum();
    }
  }
  const Eigen::ArrayXf of_row = largest.rowwise().maxCoeff();
  largest = (largest.colwise() - of_row).exp();
  const Eigen::ArrayXf total = (largest * mass).rowwise().sum() * static_cast<float>(rows);
  for (index_t b = 0; b * tile < data.point.past(); ++b) {
    const index_t first = b * tile, n = std::min(tile, t - first), scored = std::min(n, data.point.past() - first);
    Eigen::Map<Eigen::RowVectorXf>(data.out.data() + first, scored).noalias() =
        (largest.col(b) / total).matrix().transpose() * tile_of(first, n).leftCols(scored);
  }
  pool(data);
}

void check_scores(const Data& data, const std::string& what, float tolerance) {
  for (index_t h = 0; h < data.point.heads; ++h) {
    const float* got = data.out.data() + std::ptrdiff_t{h} * data.point.tokens;
    const float* want = data.reference.data() + std::ptrdiff_t{h} * data.point.past();
    const float largest = *std::max_element(want, want + data.point.past());
    for (index_t j = 0; j < data.point.past(); ++j)
      if (!(std::abs(got[j] - want[j]) <= tolerance * largest))
        fail_domain(what, ": head ", h, ", token ", j, ": ", got[j], ", the reference has ", want[j]);
  }
}

using Work = std::function<void(Data&)>;

void add(const std::string& operation, const std::string& name, const Point& point, const Work& work, float tolerance) {
  std::function<void()> check;
  if (tolerance > 0)
    check = [=] {
      Data& data = data_of(point);
      std::fill(data.out.begin(), data.out.end(), 0.f);
      work(data);
      check_scores(data, operation + '/' + name, tolerance);
    };
  add_case({operation + '/' + name + '/' + std::to_string(point.tokens), check, [=](benchmark::State& state) {
              Data& data = data_of(point);
              work(data);
              for (auto _ : state) {
                work(data);
                benchmark::ClobberMemory();
              }
              state.counters["FLOPS"] =
                  benchmark::Counter(point.flops(), benchmark::Counter::kIsIterationInvariantRate);
            }});
}

// The scorer on rows of T. tolerance 0: no check, the scores are not those of the reference.
template <class T>
void add_ours(const std::string& operation, const Point& point, score::SnapKV scorer, bool with_lse, int threads,
              const std::vector<T> Data::*keys, const std::vector<T> Data::*queries, float tolerance) {
  scorer.window = point.window;
  add(
      operation, "kvevict", point,
      [=](Data& data) {
        const OwnedObservation<T> layer = data.observed(data.*keys, data.*queries);
        LayerObservation<T> o = layer.observation();
        if (with_lse) o.extras.lse = data.lse;
        score_on(host_exec{threads, &data.arena}, scorer, o,
                 {data.out.data(), point.heads, point.tokens, point.tokens});
      },
      tolerance);
}
void add_ours(const std::string& operation, const Point& point, score::SnapKV scorer = {}, bool with_lse = false,
              int threads = 1) {
  add_ours(operation, point, scorer, with_lse, threads, &Data::keys, &Data::queries,
           scorer.group == GroupReduction::mean ? 1e-5f : 0.f);
}
void add_bounds(const std::string& operation, const Point& point) {
#if KVEVICT_SIMD
  add(
      operation, "fma_floor", point, [=](Data&) { benchmark::DoNotOptimize(fma_loop(point.flops())); }, 0);
#endif
  add(
      operation, "read_floor", point,
      [](Data& data) {
        benchmark::DoNotOptimize(
            Eigen::Map<Eigen::ArrayXf>(data.keys.data(), static_cast<Eigen::Index>(data.keys.size())).sum());
      },
      0);
}
void add_rivals(const std::string& operation, const Point& point) {
  add(operation, "eigen_naive", point, eigen_naive, 1e-5f);
  add(operation, "eigen_tiled", point, eigen_tiled, 1e-5f);
  add_bounds(operation, point);
}

const bool added = [] {
  for (const index_t tokens : {1024, 4096, 16384, 32768, 65536, 131072}) {
    const Point point{.tokens = tokens};
    add_ours("score_window", point);
    add_rivals("score_window", point);
    add_ours("score_window.lse", point, {}, true);
    add_rivals("score_window.lse", point);
    // Rows of 16 bits are other numbers: they are held to the reference of the float32 ones by what rounding changes.
    add_ours("score_window.f16", point, {}, false, 1, &Data::keys_f16, &Data::queries_f16, 2e-2f);
    add_bounds("score_window.f16", point);
    add_ours("score_window.bf16", point, {}, false, 1, &Data::keys_bf16, &Data::queries_bf16, 1e-1f);
    add_bounds("score_window.bf16", point);
  }
  const auto add_shape = [](const std::string& suffix, const Point& point) {
    add_ours("score_window." + suffix, point);
    add_rivals("score_window." + suffix, point);
    add_ours("score_window.lse." + suffix, point, {}, true);
    add_bounds("score_window.lse." + suffix, point);
  };
  add_shape("d64", {.tokens = 32768, .dim = 64});
  add_shape("w8", {.tokens = 32768, .window = 8});
  add_shape("w64", {.tokens = 32768, .window = 64});
  add_shape("g1", {.tokens = 32768, .group = 1});
  add_shape("g8", {.tokens = 32768, .group = 8});
  const Point point{.tokens = 32768}, heads{.tokens = 32768, .heads = 8};
  score::SnapKV by_largest, two_passes;
  by_largest.group = GroupReduction::max;
  two_passes.scratch_limit = 1;
  add_ours("score_window.max", point, by_largest);
  add_ours("score_window.two_passes", point, two_passes);
  add_ours("score_window.h8", heads);
  add_ours("score_window.h8.threads2", heads, {}, false, 2);
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
