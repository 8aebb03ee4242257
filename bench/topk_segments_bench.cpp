// topk_segments/<implementation>/<t>: 64 rows of t scores, 15 % of each kept (topk_segments.ragged: 5 % to 25 %), one
// thread; .threads2 with two. topk_flat/<implementation>/<t>: 8 heads of t scores ranked as one list, of which Ada-KV
// needs how many of the best 15 % fall into each head.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/cases.hpp"
#include "common/inputs.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/topk.hpp"
#include "kvevict/cpu/topk_rows.hpp"

namespace kvevict::bench {
namespace {

// Rows of lognormal scores with the rows kept of each, and working memory; made when first used.
struct Data {
  index_t rows = 0, cols = 0;
  std::vector<float> scores;
  std::vector<index_t> lengths, out, counts;
  std::vector<std::int64_t> offsets{0};
  std::vector<IndexRange> ranges;
  std::vector<std::uint64_t> packed;
  std::vector<std::byte> scratch;
  Arena arena;

  Data(index_t r, index_t c, bool ragged) : rows(r), cols(c) {
    scores = make_scores(Scores::lognormal, static_cast<std::size_t>(r) * static_cast<std::size_t>(c), 7);
    for (index_t i = 0; i < r; ++i) {
      lengths.push_back(c);
      ranges.push_back({0, c});
      offsets.push_back(offsets.back() + std::int64_t{c} * (ragged ? 5 + 20 * i / (r - 1) : 15) / 100);
    }
    out.resize(static_cast<std::size_t>(offsets.back()));
    counts.resize(static_cast<std::size_t>(r));
    packed.resize(scores.size());
    scratch.resize(flat_topk_scratch_bytes(r, c));
  }
  Matrix<const float> matrix() const { return {scores.data(), rows, cols, cols}; }
};

Data& data_of(index_t rows, index_t cols, bool ragged) {
  static std::pair<std::vector<index_t>, std::unique_ptr<Data>> cached;
  const std::vector<index_t> key{rows, cols, ragged};
  if (cached.first != key) cached = {key, std::make_unique<Data>(rows, cols, ragged)};
  return *cached.second;
}

std::uint64_t packed_entry(float score, std::size_t index) {
  std::uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  bits ^= (bits >> 31) != 0 ? 0xffffffffu : 0x80000000u;
  return (std::uint64_t{bits} << 32) | static_cast<std::uint32_t>(~index);
}

// The best k of scores[0, n) to the front of packed.
void partition(const float* scores, std::size_t n, std::int64_t k, std::uint64_t* packed) {
  for (std::size_t i = 0; i < n; ++i) packed[i] = packed_entry(scores[i], i);
  std::nth_element(packed, packed + k, packed + n, std::greater<>{});
}

void kvevict_rows(Data& d, int threads) { topk_rows({threads, &d.arena}, d.matrix(), d.lengths, d.offsets, d.out); }
void u64_rows(Data& d, int) {
  for (index_t r = 0; r < d.rows; ++r) {
    const std::int64_t first = d.offsets[static_cast<std::size_t>(r)],
                       k = d.offsets[static_cast<std::size_t>(r) + 1] - first;
    partition(d.matrix().row(r), static_cast<std::size_t>(d.cols), k, d.packed.data());
    for (std::int64_t i = 0; i < k; ++i)
      d.out[static_cast<std::size_t>(first + i)] =
          static_cast<index_t>(~d.packed[static_cast<std::size_t>(i)] & 0x7fffffffu);
  }
}
void read_all(Data& d, int) {
  const auto* bits = reinterpret_cast<const detail::ScoreBits<float>::type*>(d.scores.data());
  std::int32_t largest = bits[0];
  for (std::size_t i = 1; i < d.scores.size(); ++i) largest = std::max<std::int32_t>(largest, bits[i]);
  d.counts[0] = largest;
}
void kvevict_flat(Data& d, int) { flat_topk_counts(d.matrix(), d.ranges, d.offsets.back(), d.counts, d.scratch); }
void u64_flat(Data& d, int) {
  partition(d.scores.data(), d.scores.size(), d.offsets.back(), d.packed.data());
  std::fill(d.counts.begin(), d.counts.end(), 0);
  for (std::int64_t i = 0; i < d.offsets.back(); ++i)
    ++d.counts[(~d.packed[static_cast<std::size_t>(i)] & 0xffffffffu) / static_cast<std::uint32_t>(d.cols)];
}

using Implementation = void (*)(Data&, int threads);

void add(const std::string& operation, const std::string& name, Implementation f, Implementation reference,
         index_t rows, index_t cols, bool ragged, int threads) {
  const auto check = [=] {
    Data& d = data_of(rows, cols, ragged);
    const auto result = [&](Implementation compute) {
      compute(d, threads);
      std::vector<index_t> got = d.out;
      for (std::size_t r = 0; r + 1 < d.offsets.size(); ++r)
        std::sort(got.begin() + d.offsets[r], got.begin() + d.offsets[r + 1]);
      got.insert(got.end(), d.counts.begin(), d.counts.end());
      return got;
    };
    if (result(f) != result(reference)) fail_domain("the result differs from the reference");
  };
  const auto run = [=](benchmark::State& state) {
    Data& d = data_of(rows, cols, ragged);
    for (auto _ : state) {
      f(d, threads);
      benchmark::ClobberMemory();
    }
  };
  add_case({operation + '/' + name + '/' + std::to_string(cols), name == "read_floor" ? std::function<void()>() : check,
            run});
}

const bool added = [] {
  for (const index_t tokens : {4096, 32768}) {
    for (const bool ragged : {false, true}) {
      const std::string operation = ragged ? "topk_segments.ragged" : "topk_segments";
      add(operation, "kvevict", kvevict_rows, u64_rows, 64, tokens, ragged, 1);
      add(operation, "nth_element_u64", u64_rows, u64_rows, 64, tokens, ragged, 1);
      add(operation, "read_floor", read_all, u64_rows, 64, tokens, ragged, 1);
    }
    add("topk_segments.threads2", "kvevict", kvevict_rows, u64_rows, 64, tokens, false, 2);
    add("topk_flat", "kvevict", kvevict_flat, u64_flat, 8, tokens, false, 1);
    add("topk_flat", "nth_element_u64", u64_flat, u64_flat, 8, tokens, false, 1);
    add("topk_flat", "read_floor", read_all, u64_flat, 8, tokens, false, 1);
  }
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
