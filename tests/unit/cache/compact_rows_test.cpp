#include "kvevict/cache/compact_rows.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/random_cache.hpp"

using namespace kvevict;
using kvevict::testing::Random;
using kvevict::testing::random_subset;

namespace {

// Byte b of row r, different for each row.
std::vector<std::byte> numbered(std::size_t rows, std::size_t row_bytes, std::size_t shift) {
  std::vector<std::byte> out(shift + rows * row_bytes + 64, std::byte{0xee});
  for (std::size_t i = 0; i < rows * row_bytes; ++i)
    out[shift + i] = static_cast<std::byte>((i / row_bytes * 31 + i % row_bytes * 7) & 0xff);
  return out;
}

bool holds(const std::byte* at, const std::vector<index_t>& keep, std::size_t row_bytes) {
  const auto source = numbered(static_cast<std::size_t>(keep.empty() ? 0 : keep.back() + 1), row_bytes, 0);
  for (std::size_t i = 0; i < keep.size(); ++i)
    for (std::size_t b = 0; b < row_bytes; ++b)
      if (at[i * row_bytes + b] != source[static_cast<std::size_t>(keep[i]) * row_bytes + b]) return false;
  return true;
}

}  // namespace

TEST_CASE("kept rows are found as maximal runs") {
  std::vector<index_t> runs;
  for_each_run(std::vector<index_t>{0, 1, 2, 5, 7, 8}, [&](index_t first, index_t count) {
    runs.push_back(first);
    runs.push_back(count);
  });
  CHECK(runs == std::vector<index_t>{0, 3, 5, 1, 7, 2});
  for_each_run({}, [&](index_t, index_t) { FAIL("no rows, no runs"); });
}

TEST_CASE("three of five rows of three bytes move to the front") {
  std::vector<std::byte> rows;
  for (int i = 0; i < 15; ++i) rows.push_back(static_cast<std::byte>(i));
  compact_rows(rows.data(), rows.data(), 3, std::vector<index_t>{0, 2, 3});
  for (int i = 0; i < 3; ++i) CHECK(static_cast<int>(rows[static_cast<std::size_t>(i)]) == i);
  for (int i = 3; i < 9; ++i) CHECK(static_cast<int>(rows[static_cast<std::size_t>(i)]) == i + 3);
  for (int i = 9; i < 15; ++i) CHECK(static_cast<int>(rows[static_cast<std::size_t>(i)]) == i);  // left alone
}

TEST_CASE(
    "rows of any size and alignment are kept in place, towards the front and out of place, by both kinds of store") {
  Random random(1);
  for (const std::size_t row_bytes : {1u, 2u, 6u, 16u, 31u, 64u, 96u, 128u, 130u, 256u, 520u, 2048u})
    for (const std::size_t shift : {0u, 2u, 13u})
      for (const index_t count : {0, 1, 9, 40, 70}) {
        CAPTURE(row_bytes);
        CAPTURE(shift);
        CAPTURE(count);
        const std::size_t tokens = 70;
        const auto keep = random_subset(static_cast<index_t>(tokens), count, random);
        for (const auto move : {&compact_rows, &stream_rows}) {
          auto in_place = numbered(tokens, row_bytes, shift);
          move(in_place.data() + shift, in_place.data() + shift, row_bytes, keep);
          CHECK(holds(in_place.data() + shift, keep, row_bytes));
          CHECK(in_place[shift + tokens * row_bytes] == std::byte{0xee});

          // The destination overlaps the rows from below by less than a row.
          auto before = numbered(tokens, row_bytes, shift);
          std::byte* to = before.data() + shift - (shift < row_bytes ? shift : row_bytes);
          move(to, before.data() + shift, row_bytes, keep);
          CHECK(holds(to, keep, row_bytes));

          const auto source = numbered(tokens, row_bytes, shift);
          std::vector<std::byte> out(keep.size() * row_bytes + shift + 1, std::byte{0xaa});
          move(out.data() + shift, source.data() + shift, row_bytes, keep);
          CHECK(holds(out.data() + shift, keep, row_bytes));
          CHECK(out.back() == std::byte{0xaa});
        }
      }
}

TEST_CASE("rows of one head move the same way whether they are dense, apart or in blocks") {
  Random random(3);
  for (const index_t count : {0, 1, 7, 40})
    for (const index_t cols : {1, 3}) {
      const auto keep = random_subset(count, count / 2, random);
      std::vector<float> dense(static_cast<std::size_t>(count * cols));
      for (std::size_t i = 0; i < dense.size(); ++i) dense[i] = static_cast<float>(i);
      // Apart: two elements of somebody else between rows. In blocks of three rows, which lie in reverse order.
      std::vector<float> apart(static_cast<std::size_t>(count * (cols + 2)), -1.f);
      const index_t block_rows = 3, blocks = (count + block_rows - 1) / block_rows;
      std::vector<index_t> table;
      for (index_t b = 0; b < blocks; ++b) table.push_back(blocks - 1 - b);
      std::vector<float> paged(static_cast<std::size_t>(blocks * block_rows * cols), -1.f);
      const Rows<float> all[]{dense_rows(dense.data(), count, cols),
                              {apart.data(), count, cols, cols + 2},
                              {paged.data(), count, cols, cols, 1, table.data(), block_rows, block_rows * cols}};
      for (index_t r = 0; r < count; ++r)
        for (index_t c = 0; c < cols; ++c)
          for (const auto& rows : all) rows.at(r, c) = static_cast<float>(r * cols + c);
      for (const auto& rows : all) {
        compact_rows(rows, keep);
        for (std::size_t i = 0; i < keep.size(); ++i)
          for (index_t c = 0; c < cols; ++c)
            CHECK(rows.at(static_cast<std::int64_t>(i), c) == static_cast<float>(keep[i] * cols + c));
      }
      CHECK(std::count(apart.begin(), apart.end(), -1.f) == 2 * count);  // what lies between is left alone
    }
  float column[4]{};
  CHECK_THROWS_AS(compact_rows(Rows<float>{column, 2, 2, 1, 2}, std::vector<index_t>{1}), std::invalid_argument);
}
