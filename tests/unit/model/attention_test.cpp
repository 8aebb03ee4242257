#include "kvevict/model/attention.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

using namespace kvevict;

namespace {

constexpr index_t dim = 40, queries = 5;  // whole vectors of every instruction set, and a rest
constexpr CacheShape shape{1, 2, 6, dim, dim};
constexpr float scale = 0.3f;

std::vector<float> noise(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(size);
  for (float& x : out) x = normal(random);
  return out;
}

// Keys and values of two heads of different length, dense.
struct Data {
  std::vector<index_t> tokens{300, 37};
  std::vector<std::vector<float>> k, v;
  std::vector<float> q = noise(queries * 6 * dim, 9);
  Data() {
    for (const index_t n : tokens) {
      k.push_back(noise(static_cast<std::size_t>(n * dim), 1 + static_cast<unsigned>(n)));
      v.push_back(noise(static_cast<std::size_t>(n * dim), 2 + static_cast<unsigned>(n)));
    }
  }
  std::vector<Rows<const float>> rows(const std::vector<std::vector<float>>& values, index_t less = 0) const {
    std::vector<Rows<const float>> out;
    for (std::size_t h = 0; h < 2; ++h) out.push_back(dense_rows(values[h].data(), tokens[h] - less, dim));
    return out;
  }
};

struct Outcome {
  std::vector<float> out, lse;
};

Outcome attended(const Data& d, const std::vector<Rows<const float>>& k, const std::vector<Rows<const float>>& v,
                 index_t first, index_t count, int threads = 1) {
  const std::size_t n = static_cast<std::size_t>(count) * 6;
  Outcome o{std::vector<float>(n * dim), std::vector<float>(n)};
  streaming_attention({threads}, shape, scale, {d.q.data() + first * 6 * dim, count, 6 * dim, 6 * dim},
                      {o.out.data(), count, 6 * dim, 6 * dim}, o.lse.data(),
                      AttendedRows<float>{k, v, AttendedRows<float>::Visible::causal, {}});
  return o;
}

}  // namespace

TEST_CASE("attention of one and of several queries is the textbook's, over heads of different length") {
  const Data d;
  for (const index_t count : {1, queries}) {
    const Outcome o = attended(d, d.rows(d.k), d.rows(d.v), 0, count);
    for (index_t i = 0; i < count; ++i)
      for (index_t qh = 0; qh < 6; ++qh) {
        const auto h = static_cast<std::size_t>(qh / 3);
        const index_t seen = d.tokens[h] - count + i + 1;
        std::vector<double> weight;
        double total = 0;
        for (index_t r = 0; r < seen; ++r) {
          double s = 0;
          for (index_t c = 0; c < dim; ++c)
            s += static_cast<double>(d.q[static_cast<std::size_t>((i * 6 + qh) * dim + c)]) *
                 static_cast<double>(d.k[h][static_cast<std::size_t>(r * dim + c)]);
          total += weight.emplace_back(std::exp(s * static_cast<double>(scale)));
        }
        CHECK(static_cast<double>(o.lse[static_cast<std::size_t>(qh * count + i)]) ==
              doctest::Approx(std::log(total)).epsilon(1e-5));
        for (const index_t c : {0, 17, dim - 1}) {
          double sum = 0;
          for (index_t r = 0; r < seen; ++r)
            sum += weight[static_cast<std::size_t>(r)] / total *
                   static_cast<double>(d.v[h][static_cast<std::size_t>(r * dim + c)]);
          CHECK(std::abs(static_cast<double>(o.out[static_cast<std::size_t>((i * 6 + qh) * dim + c)]) - sum) < 2e-5);
        }
      }
  }
}

TEST_CASE("a query alone, with others or on another thread has the same bits") {
  const Data d;
  const Outcome all = attended(d, d.rows(d.k), d.rows(d.v), 0, queries);
  CHECK(attended(d, d.rows(d.k), d.rows(d.v), 0, queries, 4).out == all.out);
  for (index_t i = 0; i < queries; ++i) {
    const index_t unseen = queries - 1 - i;
    const Outcome one = attended(d, d.rows(d.k, unseen), d.rows(d.v, unseen), i, 1);
    for (index_t c = 0; c < 6 * dim; ++c)
      CHECK(one.out[static_cast<std::size_t>(c)] == all.out[static_cast<std::size_t>(i * 6 * dim + c)]);
  }
}

TEST_CASE("where rows lie changes no bit: strided elements, and blocks out of order") {
  const Data d;
  const Outcome dense = attended(d, d.rows(d.k), d.rows(d.v), 0, 1);

  std::vector<std::vector<float>> wide_k(2), wide_v(2);
  std::vector<Rows<const float>> k, v;
  for (std::size_t h = 0; h < 2; ++h) {
    for (const float x : d.k[h]) wide_k[h].insert(wide_k[h].end(), {x, -7.f});
    for (const float x : d.v[h]) wide_v[h].insert(wide_v[h].end(), {x, -7.f});
    k.push_back({wide_k[h].data(), d.tokens[h], dim, 2 * dim, 2});
    v.push_back({wide_v[h].data(), d.tokens[h], dim, 2 * dim, 2});
  }
  CHECK(attended(d, k, v, 0, 1).out == dense.out);

  constexpr index_t block = 16;
  std::vector<std::vector<float>> mixed_k(2), mixed_v(2);
  std::vector<std::vector<index_t>> table(2);
  k.clear(), v.clear();
  for (std::size_t h = 0; h < 2; ++h) {
    const index_t blocks = (d.tokens[h] + block - 1) / block;
    mixed_k[h].resize(static_cast<std::size_t>(blocks * block * dim));
    mixed_v[h] = mixed_k[h];
    for (index_t b = 0; b < blocks; ++b) table[h].push_back(blocks - 1 - b);
    for (index_t r = 0; r < d.tokens[h]; ++r)
      for (index_t c = 0; c < dim; ++c) {
        const auto to =
            static_cast<std::size_t>((table[h][static_cast<std::size_t>(r / block)] * block + r % block) * dim + c);
        mixed_k[h][to] = d.k[h][static_cast<std::size_t>(r * dim + c)];
        mixed_v[h][to] = d.v[h][static_cast<std::size_t>(r * dim + c)];
      }
    k.push_back({mixed_k[h].data(), d.tokens[h], dim, dim, 1, table[h].data(), block, block * dim});
    v.push_back({mixed_v[h].data(), d.tokens[h], dim, dim, 1, table[h].data(), block, block * dim});
  }
  CHECK(attended(d, k, v, 0, 1).out == dense.out);
}
