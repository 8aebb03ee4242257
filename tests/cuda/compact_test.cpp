// Compaction kernels in the emulated block: every layout, word size and thread order against a plain copy.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "host_cta.hpp"
#include "kvevict/cuda/detail/compact_steps.hpp"

using namespace kvevict;
using emulation::HostCta;
using emulation::launch;
using emulation::Order;

namespace {

struct Plan {
  std::vector<std::int64_t> offsets{3};  // plans of one layer need not begin at 0
  std::vector<index_t> rows{7, 7, 7};
  std::vector<index_t> tokens;

  explicit Plan(const std::vector<index_t>& heads, unsigned seed, double share) : tokens(heads) {
    std::mt19937 random(seed);
    for (const index_t t : tokens) {
      for (index_t r = 0; r < t; ++r)
        if (static_cast<double>(random() % 1000) < share * 1000) rows.push_back(r);
      offsets.push_back(static_cast<std::int64_t>(rows.size()));
    }
  }
  cuda::KeepRows keep() const {
    return {offsets.data(), rows.data(), static_cast<std::int64_t>(rows.size()), tokens.data()};
  }
};

std::vector<unsigned char> random_bytes(std::size_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<unsigned char> out(n);
  for (auto& b : out) b = static_cast<unsigned char>(random());
  return out;
}

// The kept rows of all heads, one after the other, as they lie in `store`.
std::vector<unsigned char> kept(const cuda::RowStore& store, const Plan& plan, bool compacted) {
  std::vector<unsigned char> out;
  for (std::size_t h = 0; h < plan.tokens.size(); ++h)
    for (std::int64_t i = plan.offsets[h]; i < plan.offsets[h + 1]; ++i) {
      const std::int64_t r = compacted ? i - plan.offsets[h] : plan.rows[static_cast<std::size_t>(i)];
      const unsigned char* row = store.row(static_cast<index_t>(h), r);
      out.insert(out.end(), row, row + store.row_bytes);
    }
  return out;
}

void compact(const cuda::MoveArgs& args, int slices, int heads, int threads, Order order) {
  launch({slices, heads, 1}, threads, 0, order, [&](HostCta& cta, void*) { cuda::compact_in_place(cta, args); });
}

}  // namespace

TEST_CASE("rows move down in place, whatever order the threads run in") {
  for (const Order order : {Order::forward, Order::backward, Order::shuffled})
    for (const double share : {0.0, 0.1, 0.5, 0.97, 1.0})
      for (const auto& [row_bytes, word, slice] :
           {std::tuple{64, 16, 2}, std::tuple{48, 16, 1}, std::tuple{20, 4, 4}, std::tuple{6, 2, 1}}) {
        const Plan plan({0, 1, 700, 333}, 5, share);
        auto bytes = random_bytes(4u * 700u * static_cast<std::size_t>(row_bytes));
        const cuda::RowStore store{bytes.data(), row_bytes, 700, nullptr, nullptr, 0, 0};
        const auto want = kept(store, plan, false);
        const int slices = static_cast<int>(cuda::ceil_div(row_bytes / word, slice));
        const cuda::MoveArgs args{plan.keep(), {{store, store, word, slice, slices}, {}, {}}};
        INFO("share ", share, ", ", store.row_bytes, " bytes a row");
        compact(args, slices, 4, 64, order);
        CHECK(kept(store, plan, true) == want);
      }
}

TEST_CASE("rows in blocks move down through the block table, and emptied blocks are returned") {
  constexpr index_t block_rows = 16, per_head = 8;
  const Plan plan({100, 33, 128}, 9, 0.4);
  std::vector<index_t> table(3 * per_head);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(4));
  auto bytes = random_bytes(3u * per_head * block_rows * 32u);
  const cuda::RowStore store{bytes.data(), 32, 0, nullptr, table.data(), per_head, block_rows};
  const auto want = kept(store, plan, false);
  const cuda::MoveArgs args{plan.keep(), {{store, store, 16, 1, 2}, {}, {}}};
  compact(args, 2, 3, 64, Order::shuffled);
  CHECK(kept(store, plan, true) == want);

  std::vector<index_t> freed(3 * per_head, -1);
  index_t count = 0;
  launch({}, 32, sizeof(cuda::BlockScratch), Order::backward, [&](HostCta& cta, void* shared) {
    cuda::free_blocks(cta, plan.keep(), 3, store, freed.data(), &count, *static_cast<cuda::BlockScratch*>(shared));
  });
  std::vector<index_t> expected;
  for (std::size_t h = 0; h < 3; ++h)
    for (std::int64_t b = (plan.offsets[h + 1] - plan.offsets[h] + block_rows - 1) / block_rows;
         b < (plan.tokens[h] + block_rows - 1) / block_rows; ++b)
      expected.push_back(table[h * per_head + static_cast<std::size_t>(b)]);
  freed.resize(static_cast<std::size_t>(count));
  CHECK(freed == expected);
}

TEST_CASE("gathering into new memory packs ragged heads, positions as well") {
  const Plan plan({50, 0, 7, 300}, 21, 0.3);
  std::vector<std::int64_t> first{100};  // areas of a larger buffer
  for (const index_t t : plan.tokens) first.push_back(first.back() + t);
  std::vector<index_t> positions(357);
  std::iota(positions.begin(), positions.end(), 1000);
  auto bytes = random_bytes(357 * 32);
  const std::size_t rows = plan.rows.size() - 3;
  std::vector<unsigned char> out(rows * 32);
  std::vector<index_t> out_positions(rows);
  const cuda::RowStore from{bytes.data(), 32, 0, first.data(), nullptr, 0, 0},
      to{out.data(), 32, 0, plan.offsets.data(), nullptr, 0, 0};
  const cuda::RowStore p_from{reinterpret_cast<unsigned char*>(positions.data()), 4, 0, first.data(), nullptr, 0, 0};
  const cuda::RowStore p_to{
      reinterpret_cast<unsigned char*>(out_positions.data()), 4, 0, plan.offsets.data(), nullptr, 0, 0};
  const cuda::MoveArgs args{plan.keep(), {{from, to, 16, 0, 0}, {p_from, p_to, 4, 0, 0}, {}}};
  launch({3, 4, 2}, 64, 0, Order::shuffled, [&](HostCta& cta, void*) { cuda::gather_rows(cta, args, 3); });
  CHECK(out == kept(from, plan, false));
  std::size_t at = 0;
  for (std::size_t h = 0; h < 4; ++h)
    for (std::int64_t i = plan.offsets[h]; i < plan.offsets[h + 1]; ++i)
      CHECK(out_positions[at++] ==
            1000 + static_cast<index_t>(first[h] - 100) + plan.rows[static_cast<std::size_t>(i)]);

  std::vector<index_t> tokens(4);
  std::vector<std::int64_t> areas(5);
  launch({}, 32, sizeof(cuda::BlockScratch), Order::forward, [&](HostCta& cta, void* shared) {
    cuda::set_lengths(cta, plan.keep(), 4, tokens.data(), areas.data(), *static_cast<cuda::BlockScratch*>(shared));
  });
  for (std::size_t h = 0; h < 4; ++h) {
    CHECK(tokens[h] == plan.offsets[h + 1] - plan.offsets[h]);
    CHECK(areas[h + 1] == plan.offsets[h + 1] - 3);
  }
}

TEST_CASE("a plan that no cache can carry out is flagged at its first bad entry") {
  const auto fault = [](const Plan& plan, bool equal) {
    unsigned long long error = cuda::no_error;
    launch({static_cast<int>(plan.tokens.size()), 1, 1}, 64, 0, Order::backward,
           [&](HostCta& cta, void*) { cuda::check_rows(cta, plan.keep(), equal, 8, &error); });
    return error;
  };
  Plan plan({90, 90}, 2, 0.9);
  CHECK(fault(plan, false) == cuda::no_error);
  CHECK(fault(plan, true) != cuda::no_error);  // the two heads keep different numbers of rows
  Plan twice = plan;
  twice.rows[static_cast<std::size_t>(twice.offsets[1]) + 5] =
      twice.rows[static_cast<std::size_t>(twice.offsets[1]) + 4];
  CHECK(fault(twice, false) == cuda::error_word(cuda::Fault::bad_plan, 9, 5));
  Plan outside = plan;
  outside.rows.back() = 90;
  CHECK(cuda::row_of(fault(outside, false)) == 9);
  Plan negative = plan;
  negative.rows[3] = -1;
  CHECK(fault(negative, false) == cuda::error_word(cuda::Fault::bad_plan, 8, 0));
}
