// The window scorer's kernels in the emulated block, against the host scorer; fragment layouts against plain products.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "host_cta.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/cuda/detail/window_steps.hpp"
#include "kvevict/score/snapkv.hpp"

using namespace kvevict;
using emulation::HostCta;
using emulation::launch;
using emulation::Order;

namespace {

template <class T>
std::vector<T> normal(std::size_t n, unsigned seed, float scale = 1.f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> d(0.f, scale);
  std::vector<T> out(n);
  for (auto& x : out) x = from_float<T>(d(random));
  return out;
}

// One layer with its owners.
template <class T>
struct Layer {
  CacheShape shape;
  std::vector<std::vector<T>> key_data, query_data;
  std::vector<std::vector<index_t>> position_data;
  std::vector<index_t> window_positions;
  OwnedObservation<T> owner;

  // Heads of the given lengths; queries of the newest `recorded` positions.
  Layer(index_t group, index_t dim, const std::vector<index_t>& tokens, index_t recorded, unsigned seed) {
    const auto heads = static_cast<index_t>(tokens.size());
    shape = {1, heads, heads * group, dim, dim};
    index_t newest = 0;
    for (const index_t t : tokens) newest = std::max(newest, t);
    for (index_t h = 0; h < heads; ++h) {
      const index_t t = tokens[static_cast<std::size_t>(h)];
      key_data.push_back(normal<T>(static_cast<std::size_t>(t) * static_cast<std::size_t>(dim),
                                   seed + 10u + static_cast<unsigned>(h)));
      std::vector<index_t> p;
      for (index_t j = 0; j < t; ++j) p.push_back(newest - t + j);
      position_data.push_back(p);
    }
    for (index_t q = 0; q < shape.q_heads; ++q)
      query_data.push_back(normal<T>(static_cast<std::size_t>(recorded * dim), seed + 100u + static_cast<unsigned>(q)));
    for (index_t i = 0; i < recorded; ++i) window_positions.push_back(newest - recorded + i);
    owner.shape = shape;
    owner.softmax_scale = 1.f / std::sqrt(static_cast<float>(dim));
    owner.window_positions = window_positions;
    for (index_t h = 0; h < heads; ++h) {
      const auto i = static_cast<std::size_t>(h);
      owner.keys.push_back(dense_rows<const T>(key_data[i].data(), tokens[i], dim));
      owner.positions.push_back(position_data[i]);
    }
    for (const auto& q : query_data) owner.window_queries.push_back(dense_rows<const T>(q.data(), recorded, dim));
  }
};

// The launches of window_attention.cuh, on few threads.
template <class T, int Blocks, int Tiles>
std::vector<float> on_device(const Layer<T>& layer, const score::SnapKV& scorer, index_t width, int threads, int steps,
                             int chunk_tiles, Order order, const std::vector<float>& lse = {}) {
  const CacheShape s = layer.shape;
  const LayerObservation<T> o = layer.owner.observation();
  std::vector<const index_t*> positions;
  for (const auto& p : o.positions) positions.push_back(p.data());
  const auto recorded = static_cast<index_t>(o.window_positions.size());
  const int per_block = steps * (threads / 32) * Tiles * 8;
  const auto splits = static_cast<index_t>(cuda::ceil_div(width, per_block));
  std::vector<index_t> visible(static_cast<std::size_t>(s.kv_heads * scorer.window), -1);
  const auto rows = static_cast<std::size_t>(s.q_heads * scorer.window);
  std::vector<cuda::LogSum> partial(rows * static_cast<std::size_t>(splits));
  std::vector<float> row_lse(rows);
  const index_t out_rows = scorer.score_heads(s);
  std::vector<float> out(static_cast<std::size_t>(out_rows) * static_cast<std::size_t>(width), -77.f);
  std::int32_t largest = 0;

  cuda::WindowArgs<T> args{};
  args.keys = o.keys.data();
  args.queries = o.window_queries.data();
  args.key_positions = positions.data();
  args.query_positions = o.window_positions.data();
  args.heads = s.kv_heads;
  args.group = s.group();
  args.window = scorer.window;
  args.recorded = recorded;
  args.scale = o.softmax_scale * cuda::log2_e;
  args.lse = lse.empty() ? nullptr : lse.data();
  args.visible = visible.data();
  args.partial = partial.data();
  args.row_lse = row_lse.data();
  args.splits = splits;
  args.steps = steps;
  args.chunk_tiles = chunk_tiles;
  args.out = out.data();
  args.out_stride = width;
  args.mean_rows = scorer.rows == RowReduction::mean;
  args.group_first = scorer.order == PoolOrder::group_then_pool;
  args.group_op = scorer.group;
  args.pool = scorer.pool;
  args.fill = -std::numeric_limits<float>::infinity();
  args.largest = scorer.protect == ProtectShare::score ? &largest : nullptr;

  launch({s.kv_heads, 1, 1}, 32, 0, order, [&](HostCta& cta, void*) { cuda::count_visible(cta, args); });
  if (lse.empty()) {
    launch({splits, s.kv_heads, 1}, threads, cuda::lse_shared(args, Blocks, threads / 32).bytes(), order,
           [&](HostCta& cta, void* shared) {
             cuda::sum_exponentials<T, Blocks, Tiles>(cta, args, static_cast<unsigned char*>(shared));
           });
    launch({s.kv_heads, 1, 1}, 32, 0, order, [&](HostCta& cta, void*) { cuda::join_exponentials(cta, args); });
  }
  const int parts = static_cast<int>(cuda::ceil_div(width, per_block - 2 * args.halo()));
  launch({parts, s.kv_heads, 1}, threads, cuda::score_shared(args, Blocks, Tiles, threads / 32).bytes(), order,
         [&](HostCta& cta, void* shared) {
           cuda::score_window<T, Blocks, Tiles>(cta, args, static_cast<unsigned char*>(shared));
         });
  if (args.largest)
    launch({1, out_rows, 1}, 32, 0, order, [&](HostCta& cta, void*) { cuda::fill_protected(cta, args, scorer.sinks); });
  return out;
}

template <class T>
std::vector<float> on_host(const Layer<T>& layer, const score::SnapKV& scorer, index_t width) {
  const index_t rows = scorer.score_heads(layer.shape);
  std::vector<float> out(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width), -77.f);
  score_on(host_exec{}, scorer, layer.owner.observation(), Matrix<float>{out.data(), rows, width, width});
  return out;
}

void check_close(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
  REQUIRE(got.size() == want.size());
  float largest = 0.f;
  for (const float x : want)
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool same = std::isfinite(want[i]) ? std::abs(got[i] - want[i]) <= tolerance * largest : got[i] == want[i];
    if (!same && wrong++ == 0) INFO("first difference at ", i, ": ", got[i], " instead of ", want[i]);
    if (!same) CHECK_MESSAGE(same, "entry ", i, ": ", got[i], " instead of ", want[i]);
    if (wrong > 3) return;
  }
}

score::SnapKV window_of(index_t window) {
  score::SnapKV out;
  out.window = window;
  return out;
}

// Rows as pack_rows leaves them.
template <class T>
std::vector<T> packed(const std::vector<T>& from, index_t rows, index_t cols) {
  const std::int64_t elements = rows * cuda::packed_stride<T>(cols);
  std::vector<T> out(static_cast<std::size_t>(elements), from_float<T>(99.f));
  launch({static_cast<int>(cuda::ceil_div<std::int64_t>(elements, 64)), 1, 1}, 64, 0, Order::forward,
         [&](HostCta& cta, void*) { cuda::pack_rows(cta, dense_rows<const T>(from.data(), rows, cols), out.data()); });
  return out;
}

// c = rows * tokens through fragments, against plain products.
template <class T, int Blocks, int Tiles>
void check_products(index_t cols, float tolerance) {
  constexpr index_t tokens = Tiles * 8;
  const auto a = normal<T>(static_cast<std::size_t>(16 * cols), 1),
             b = normal<T>(static_cast<std::size_t>(tokens * cols), 2);
  std::vector<float> got(16 * tokens, -1.f);
  const auto a_rows = packed(a, 16, cols), b_rows = packed(b, tokens, cols);
  struct Problem {
    const T *a, *b;
    index_t cols;
    std::int64_t stride;
    float* out;
    int lane;
    int row_tiles = 1, chunk_tiles = 1, terms = 1, steps = 1;
    index_t first = 0, end = tokens;
    cuda::Piece row_piece(int, int row, int, int block, int t) const {
      return cuda::load_piece(a + row * stride, cols, block, t);
    }
    cuda::PieceRow token_row(index_t token, int t) const {
      return cuda::piece_row(Rows<const T>{b, tokens, cols, stride}, token, t);
    }
    cuda::Piece token_piece(const cuda::PieceRow& row, int block) const { return row[block]; }
    void begin(index_t) {}
    void finish(index_t) {}
    void products(int, const float (&c)[Tiles][4], index_t) {
      for (int tile = 0; tile < Tiles; ++tile)
        for (int i = 0; i < 4; ++i)
          out[cuda::row_of_register(lane, i) * tokens + cuda::token_of_register(lane, tile, i)] = c[tile][i];
    }
  };
  launch({}, 32, static_cast<std::size_t>(cuda::tile_pieces(Blocks, 1)) * sizeof(cuda::Piece), Order::shuffled,
         [&](HostCta& cta, void* shared) {
           Problem problem{a_rows.data(), b_rows.data(), cols, cuda::packed_stride<T>(cols), got.data(), cta.lane()};
           cuda::walk_tiles<T, Blocks, Tiles>(cta, problem, static_cast<cuda::Piece*>(shared));
         });
  for (index_t r = 0; r < 16; ++r)
    for (index_t j = 0; j < tokens; ++j) {
      double want = 0;
      for (index_t c = 0; c < cols; ++c)
        want += static_cast<double>(to_float(a[static_cast<std::size_t>(r * cols + c)])) *
                static_cast<double>(to_float(b[static_cast<std::size_t>(j * cols + c)]));
      CHECK(std::abs(got[static_cast<std::size_t>(r * tokens + j)] - want) <= static_cast<double>(tolerance));
    }
}

}  // namespace

TEST_CASE("fragments of mma.sync hold the rows and tokens that the tile walk says, for every element type") {
  check_products<fp16_t, 2, 4>(64, 1e-4f);
  check_products<fp16_t, 2, 1>(40, 1e-4f);  // the last block is half empty
  check_products<bf16_t, 4, 2>(128, 1e-4f);
  check_products<bf16_t, 2, 2>(37, 1e-4f);  // no multiple of a 16-byte piece
  check_products<float, 4, 2>(64, 1e-4f);
  check_products<float, 2, 1>(19, 1e-4f);
}

TEST_CASE("two TF32 terms lose no more than 2^-19 of a float product") {
  std::mt19937 random(3);
  std::normal_distribution<float> d;
  for (int i = 0; i < 1000; ++i) {
    const float x = d(random), y = d(random);
    const auto value = [](std::uint32_t bits) {
      return static_cast<double>(std::bit_cast<float>(cuda::tf32_high(bits)));
    };
    const std::uint32_t xb = std::bit_cast<std::uint32_t>(x), yb = std::bit_cast<std::uint32_t>(y);
    const double sum =
        value(xb) * value(yb) + value(cuda::tf32_low(xb)) * value(yb) + value(xb) * value(cuda::tf32_low(yb));
    CHECK(std::abs(sum - static_cast<double>(x) * static_cast<double>(y)) <=
          0x1p-19 * std::abs(static_cast<double>(x) * static_cast<double>(y)));
  }
}

TEST_CASE("CUDA window scores equal the host scorer's in every thread order, ragged heads and short prompts included") {
  const Layer<fp16_t> layer(2, 64, {300, 211, 5, 1, 0}, 32, 7);
  const auto want = on_host(layer, window_of(32), 300);
  for (const Order order : {Order::forward, Order::backward, Order::shuffled})
    check_close(on_device<fp16_t, 2, 4>(layer, window_of(32), 300, 64, 2, 8, order), want, 1e-5f);
  // Row tiles that are staged in parts, more steps than tokens, other block sizes.
  check_close(on_device<fp16_t, 2, 4>(layer, window_of(32), 300, 64, 1, 3, Order::shuffled), want, 1e-5f);
  check_close(on_device<fp16_t, 2, 2>(layer, window_of(32), 300, 32, 5, 1, Order::backward), want, 1e-5f);
}

TEST_CASE("every reduction, pooling and order of the window scorer is the same on CUDA") {
  const Layer<bf16_t> layer(3, 32, {150, 90}, 24, 11);
  unsigned n = 0;
  for (const GroupReduction group :
       {GroupReduction::none, GroupReduction::mean, GroupReduction::max, GroupReduction::sum})
    for (const Pooling pool : {Pooling::none(), Pooling::avg(5), Pooling::max(7)})
      for (const PoolOrder order : {PoolOrder::group_then_pool, PoolOrder::pool_then_group})
        for (const ProtectShare protect : {ProtectShare::half, ProtectShare::score}) {
          score::SnapKV scorer = window_of(20);  // no multiple of a row tile
          scorer.group = group;
          scorer.pool = pool;
          scorer.order = order;
          scorer.protect = protect;
          scorer.sinks = 2;
          scorer.rows = n % 2 ? RowReduction::sum : RowReduction::mean;
          INFO("group ", static_cast<int>(group), ", pool ", print_value(pool), ", order ", static_cast<int>(order),
               ", protect ", static_cast<int>(protect));
          check_close(
              on_device<bf16_t, 1, 2>(layer, scorer, 150, 64, 2, 2, n++ % 2 ? Order::shuffled : Order::backward),
              on_host(layer, scorer, 150), 1e-5f);
        }
}

TEST_CASE("float32 caches score on CUDA within 1e-5 of the host") {
  const Layer<float> layer(1, 48, {120}, 16, 13);
  check_close(on_device<float, 4, 2>(layer, window_of(16), 120, 64, 1, 4, Order::shuffled),
              on_host(layer, window_of(16), 120), 1e-5f);
}

TEST_CASE("a given log-sum-exp replaces the first pass on CUDA") {
  Layer<fp16_t> layer(2, 32, {100}, 16, 17);
  std::vector<float> lse;
  for (index_t q = 0; q < 2; ++q)
    for (index_t i = 0; i < 16; ++i) {
      double sum = 0;
      for (index_t j = 0; j <= 84 + i; ++j) {
        double dot = 0;
        for (index_t c = 0; c < 32; ++c)
          dot += static_cast<double>(
                     to_float(layer.query_data[static_cast<std::size_t>(q)][static_cast<std::size_t>(i * 32 + c)])) *
                 static_cast<double>(to_float(layer.key_data[0][static_cast<std::size_t>(j * 32 + c)]));
        sum += std::exp(dot * static_cast<double>(layer.owner.softmax_scale));
      }
      lse.push_back(static_cast<float>(std::log(sum)));
    }
  const auto want = on_host(layer, window_of(16), 100);
  check_close(on_device<fp16_t, 1, 4>(layer, window_of(16), 100, 64, 1, 2, Order::forward, lse), want, 2e-5f);
  lse[0] += 1.f;  // and it is really used
  const auto other = on_device<fp16_t, 1, 4>(layer, window_of(16), 100, 64, 1, 2, Order::forward, lse);
  CHECK(std::abs(other[0] - want[0]) > 1e-4f * want[0]);
}

TEST_CASE("U7: a group of 24 query heads, no multiple of any tile, scores on CUDA as on the host") {
  const Layer<fp16_t> layer(24, 32, {60, 60}, 8, 19);
  check_close(on_device<fp16_t, 1, 2>(layer, window_of(8), 60, 32, 2, 5, Order::shuffled),
              on_host(layer, window_of(8), 60), 1e-5f);
}
