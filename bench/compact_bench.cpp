// compact/<implementation>/<tokens>: keeping 15 % of the rows of 8 heads, random and ascending, rows of 512 bytes
// (float32, 128 elements), one thread; bytes per second count kept rows. Suffixes on the operation name other row sizes
// (r128, r256), shares (k5, k50) and kept rows that come in runs of 7.
//   kvevict          in place, as the caches do it
//   kvevict_stream   out of place by streaming stores into memory that was touched before
//   memmove_rows     in place, one memmove a row
//   gather_fresh     out of place into memory that is allocated per call: what not to do
//   memcpy           the bound: as many bytes in one piece
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/cases.hpp"
#include "kvevict/cache/compact_rows.hpp"
#include "kvevict/cache/detail/page_buffer.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::bench {
namespace {

struct Point {
  std::size_t row_bytes = 512;
  int percent = 15;
  bool runs = false;
  index_t tokens = 0;

  friend bool operator==(const Point&, const Point&) = default;
};

constexpr std::size_t heads = 8;

struct Data {
  detail::PageBuffer rows, out;
  std::vector<std::vector<index_t>> keep;
  std::size_t head_bytes = 0, kept_bytes = 0, next_source = 0;

  explicit Data(const Point& p) : head_bytes(static_cast<std::size_t>(p.tokens) * p.row_bytes) {
    std::mt19937 random(1);
    const index_t run = p.runs ? 7 : 1;
    for (std::size_t h = 0; h < heads; ++h) {
      auto& rows_of_head = keep.emplace_back();
      for (index_t r = 0; r < p.tokens; r += run)
        if (random() % 100 < static_cast<unsigned>(p.percent))
          for (index_t i = r; i < std::min(p.tokens, r + run); ++i) rows_of_head.push_back(i);
      kept_bytes += rows_of_head.size() * p.row_bytes;
    }
    rows.resize(heads * head_bytes);
    out.resize(kept_bytes);
    std::memset(out.data(), 1, kept_bytes);
    fill();
  }

  // Every byte says where it lies.
  void fill() {
    std::uint32_t word = 0;
    for (std::size_t i = 0; i + sizeof word <= rows.size(); i += sizeof word, ++word)
      std::memcpy(rows.data() + i, &word, sizeof word);
  }
};

// The data of a point, made once; the cases of one point run one after the other.
Data& data_of(const Point& point) {
  static std::pair<Point, std::unique_ptr<Data>> cached;
  if (!cached.second || cached.first != point) {
    cached.second.reset();
    cached = {point, std::make_unique<Data>(point)};
  }
  return *cached.second;
}

// Runs `move(to, from, keep)` for each head; the kept rows of all heads end up behind each other from `to` on.
template <class Move>
void each_head(const Point& point, Data& data, std::byte* to, Move&& move) {
  for (std::size_t h = 0; h < heads; ++h) {
    move(to, data.rows.data() + h * data.head_bytes, std::span<const index_t>(data.keep[h]));
    to += data.keep[h].size() * point.row_bytes;
  }
}

// Each returns where the kept rows are.
const std::byte* kvevict_in_place(const Point& point, Data& data) {
  each_head(point, data, data.rows.data(),
            [&](std::byte* to, const std::byte* from, auto keep) { compact_rows(to, from, point.row_bytes, keep); });
  return data.rows.data();
}
const std::byte* kvevict_stream(const Point& point, Data& data) {
  each_head(point, data, data.out.data(),
            [&](std::byte* to, const std::byte* from, auto keep) { stream_rows(to, from, point.row_bytes, keep); });
  return data.out.data();
}
void copy_row_by_row(std::byte* to, const std::byte* from, std::size_t row_bytes, std::span<const index_t> keep) {
  for (const index_t r : keep) {
    std::memmove(to, from + static_cast<std::size_t>(r) * row_bytes, row_bytes);
    to += row_bytes;
  }
}
const std::byte* memmove_rows(const Point& point, Data& data) {
  each_head(point, data, data.rows.data(),
            [&](std::byte* to, const std::byte* from, auto keep) { copy_row_by_row(to, from, point.row_bytes, keep); });
  return data.rows.data();
}
const std::byte* gather_fresh(const Point& point, Data& data) {
  data.out.resize(0);
  data.out.resize(data.kept_bytes);
  each_head(point, data, data.out.data(),
            [&](std::byte* to, const std::byte* from, auto keep) { copy_row_by_row(to, from, point.row_bytes, keep); });
  return data.out.data();
}
const std::byte* plain_memcpy(const Point&, Data& data) {
  // The source moves on, as it does for whoever reads kept rows out of a large cache.
  if (data.next_source + data.kept_bytes > data.rows.size()) data.next_source = 0;
  std::memcpy(data.out.data(), data.rows.data() + data.next_source, data.kept_bytes);
  data.next_source += data.kept_bytes;
  return nullptr;
}

using Implementation = const std::byte* (*)(const Point&, Data&);

void check(const Point& point, Implementation compact) {
  Data& data = data_of(point);
  data.fill();
  std::vector<std::byte> expected(data.kept_bytes);
  std::byte* to = expected.data();
  for (std::size_t h = 0; h < heads; ++h) {
    copy_row_by_row(to, data.rows.data() + h * data.head_bytes, point.row_bytes, data.keep[h]);
    to += data.keep[h].size() * point.row_bytes;
  }
  const std::byte* got = compact(point, data);
  if (got && std::memcmp(got, expected.data(), expected.size()) != 0) fail_domain("the kept rows differ");
}

void add_point(const std::string& operation, const Point& point) {
  const std::pair<const char*, Implementation> all[] = {{"kvevict", kvevict_in_place},
                                                        {"kvevict_stream", kvevict_stream},
                                                        {"memmove_rows", memmove_rows},
                                                        {"gather_fresh", gather_fresh},
                                                        {"memcpy", plain_memcpy}};
  for (const auto& [name, compact] : all) {
    const auto run = [point, move = compact](benchmark::State& state) {
      Data& data = data_of(point);
      for (auto _ : state) {
        benchmark::DoNotOptimize(move(point, data));
        benchmark::ClobberMemory();
      }
      state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(data.kept_bytes));
    };
    add_case({operation + '/' + name + '/' + std::to_string(point.tokens),
              [point, move = compact] { check(point, move); }, run});
  }
}

const bool added = [] {
  for (const index_t tokens : {1024, 4096, 16384, 32768}) add_point("compact", {.tokens = tokens});
  for (const int percent : {5, 50})
    add_point("compact.k" + std::to_string(percent), {.percent = percent, .tokens = 32768});
  for (const std::size_t row_bytes : {std::size_t{128}, std::size_t{256}})
    add_point("compact.r" + std::to_string(row_bytes), {.row_bytes = row_bytes, .tokens = 32768});
  add_point("compact.runs", {.runs = true, .tokens = 32768});
  return true;
}();

}  // namespace
}  // namespace kvevict::bench
