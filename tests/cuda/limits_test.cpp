// Index arithmetic of the CUDA steps at its limits: rows of 0, 1 and 2^21 tokens, and arrays of more than 2^31
// elements, of which only the pages that are touched exist.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host_cta.hpp"
#include "kvevict/cuda/detail/compact_steps.hpp"
#include "kvevict/cuda/detail/group_steps.hpp"
#include "kvevict/cuda/detail/select_steps.hpp"
#include "kvevict/cuda/detail/tile.hpp"

using namespace kvevict;
using emulation::HostCta;
using emulation::launch;
using emulation::Order;

namespace {

// Address space of `count` elements, zero where it is read, without memory behind it.
template <class T>
class Sparse {
 public:
  explicit Sparse(std::int64_t count) : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(p != MAP_FAILED);
    data_ = static_cast<T*>(p);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() { munmap(data_, bytes_); }
  T* data() { return data_; }

 private:
  T* data_;
  std::size_t bytes_;
};

constexpr index_t long_row = 1 << 21;

}  // namespace

TEST_CASE("a row of 2^21 equal scores gives its first half, rows of 0 and 1 tokens give what they have") {
  Sparse<float> scores(long_row);
  for (const index_t tokens : {0, 1, long_row}) {
    const index_t budget = tokens == long_row ? long_row / 2 : 1;
    const index_t kept = std::min(tokens, budget);
    const std::vector<std::int64_t> offsets{0, kept};
    std::vector<index_t> out(static_cast<std::size_t>(kept), -1);
    unsigned long long error = cuda::no_error;
    const HeadProtect unprotected;
    cuda::SelectArgs<float> args{};
    args.scores = scores.data();
    args.row_stride = long_row;
    args.tokens = &tokens;
    args.budgets = &budget;
    args.protections = &unprotected;
    args.offsets = offsets.data();
    args.out = out.data();
    args.error = &error;
    args.staged = 100;
    launch({}, 64, sizeof(cuda::SelectShared) + 400, Order::forward, [&](HostCta& cta, void* shared) {
      auto* s = static_cast<cuda::SelectShared*>(shared);
      cuda::select_row(cta, args, *s, reinterpret_cast<std::int32_t*>(s + 1));
    });
    bool first = error == cuda::no_error;
    for (index_t i = 0; i < kept; ++i) first = first && out[static_cast<std::size_t>(i)] == i;
    CHECK(first);
  }
}

TEST_CASE("rows beyond element 2^31 are read and written where they are") {
  constexpr std::int64_t rows = 1100;
  Sparse<float> scores(rows * long_row);  // 2.3e9 scores
  Sparse<index_t> out(rows * long_row);
  std::vector<index_t> tokens(static_cast<std::size_t>(rows), 50), budgets(static_cast<std::size_t>(rows), 3);
  const std::vector<HeadProtect> protections(static_cast<std::size_t>(rows));
  std::vector<std::int64_t> offsets;
  for (std::int64_t r = 0; r <= rows; ++r) offsets.push_back(r * long_row);
  float* last = scores.data() + (rows - 1) * long_row;
  last[49] = 1.f;
  last[7] = 3.f;
  last[30] = 2.f;
  unsigned long long error = cuda::no_error;
  cuda::SelectArgs<float> args{};
  args.scores = scores.data();
  args.row_stride = long_row;
  args.tokens = tokens.data();
  args.budgets = budgets.data();
  args.protections = protections.data();
  args.offsets = offsets.data();
  args.out = out.data();
  args.error = &error;
  args.staged = 50;
  emulation::Block block(32, sizeof(cuda::SelectShared) + 200, Order::forward);
  block.run([&](int thread) {
    HostCta cta(block, thread, rows - 1, 0, 0);
    auto* s = static_cast<cuda::SelectShared*>(block.shared());
    cuda::select_row(cta, args, *s, reinterpret_cast<std::int32_t*>(s + 1));
  });
  const index_t* got = out.data() + (rows - 1) * long_row;
  CHECK(std::vector<index_t>(got, got + 3) == std::vector<index_t>{7, 30, 49});
}

TEST_CASE("chunks, histograms and stores address more than 2^31 elements") {
  cuda::GroupArgs group{};
  const IndexRange ranges[] = {{5, long_row}};
  group.rows = 60'000;
  group.group_rows = 1;
  group.chunk = 1 << 20;
  group.ranges = ranges;
  CHECK(group.chunk_of(0, 1).begin == 5 + (1 << 20));
  CHECK(group.chunk_of(0, 1).end == long_row);
  CHECK(group.chunk_of(0, 3000).begin == long_row);  // 3e9 as a position: past the end, not negative
  Sparse<std::uint32_t> bins(3ll * 60'000 * 2048);
  group.bins = bins.data();
  CHECK(group.pass_bins(2, 59'999) - bins.data() == (2ll * 60'000 + 59'999) * 2048);

  unsigned char base = 0;
  const cuda::RowStore dense{&base, 256, long_row, nullptr, nullptr, 0, 0};
  CHECK(reinterpret_cast<std::uintptr_t>(dense.row(1000, long_row - 1)) - reinterpret_cast<std::uintptr_t>(&base) ==
        (1001ull * long_row - 1) * 256);
  const index_t blocks[] = {2'000'000'000};
  const cuda::RowStore paged{&base, 256, 0, nullptr, blocks, 1, 16};
  CHECK(reinterpret_cast<std::uintptr_t>(paged.row(0, 15)) - reinterpret_cast<std::uintptr_t>(&base) ==
        (2'000'000'000ull * 16 + 15) * 256);

  const fp16_t element{};
  Rows<const fp16_t> rows{&element, 1ll << 30, 128, 512};
  const auto at = [&](index_t r) {
    return reinterpret_cast<std::uintptr_t>(cuda::piece_row(rows, r, 0).first) -
           reinterpret_cast<std::uintptr_t>(&element);
  };
  CHECK(at((1 << 30) - 1) == ((1ull << 30) - 1) * 1024);
  rows.blocks = blocks;
  rows.block_rows = 16;
  rows.block_stride = 16 * 512;
  CHECK(at(15) == (2'000'000'000ull * 16 + 15) * 1024);
}
