// The selection kernels, run in the emulated block, against the host selector.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "adversarial.hpp"
#include "host_cta.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/cuda/detail/group_steps.hpp"
#include "kvevict/cuda/detail/select_steps.hpp"
#include "kvevict/plan/plan_options.hpp"
#include "kvevict/select/ordered_key.hpp"

using namespace kvevict;
using emulation::HostCta;
using emulation::launch;
using emulation::Order;

namespace {

// One row on the host, through the CPU's selector.
std::vector<index_t> on_host(const std::vector<float>& row, index_t budget, const HeadProtect& asked) {
  std::vector<index_t> out(static_cast<std::size_t>(std::min<index_t>(budget, static_cast<index_t>(row.size()))));
  std::vector<std::byte> scratch(select_scratch_bytes(TopK{}, static_cast<index_t>(row.size())));
  select_row(TopK{}, row, budget, asked, out, scratch);
  return out;
}

struct Selected {
  std::vector<index_t> rows;
  unsigned long long error = cuda::no_error;
  std::int32_t cut = 0;
  index_t ties_left = 0;
};

template <class T>
Selected on_device(const std::vector<T>& row, index_t budget, const HeadProtect& asked, index_t staged, int threads,
                   Order order) {
  Selected out;
  const auto tokens = static_cast<index_t>(row.size());
  const std::int64_t kept = std::min(budget, tokens);
  const std::vector<std::int64_t> offsets{0, kept};
  out.rows.assign(static_cast<std::size_t>(kept), -1);
  const cuda::SelectArgs<T> args{row.data(),      tokens,   &tokens,        &budget,    &asked, false, offsets.data(),
                                 out.rows.data(), &out.cut, &out.ties_left, &out.error, 0,      staged};
  const std::size_t bytes = sizeof(cuda::SelectShared) + static_cast<std::size_t>(staged) * sizeof(std::int32_t);
  launch({}, threads, bytes, order, [&](HostCta& cta, void* shared) {
    auto* s = static_cast<cuda::SelectShared*>(shared);
    cuda::select_row(cta, args, *s, reinterpret_cast<std::int32_t*>(s + 1));
  });
  return out;
}

// Rows that several blocks share.
Selected on_blocks(const std::vector<float>& row, index_t budget, const HeadProtect& asked, index_t chunk, int threads,
                   Order order) {
  Selected out;
  const auto tokens = static_cast<index_t>(row.size());
  const std::int64_t kept = std::min(budget, tokens);
  const std::vector<std::int64_t> offsets{0, kept};
  out.rows.assign(static_cast<std::size_t>(kept), -1);
  const index_t chunks = std::max<index_t>(1, cuda::ceil_div(tokens, chunk));
  std::vector<IndexRange> ranges(1);
  std::vector<std::uint32_t> want(1), bins(3 * cuda::FixedDigits::bins, 0);
  std::vector<cuda::GroupState> states(4);
  std::vector<cuda::ChunkCounts> counts(static_cast<std::size_t>(chunks));
  cuda::LongRowArgs args{};
  args.select = {row.data(),      tokens,  &tokens, &budget,    &asked, false, offsets.data(),
                 out.rows.data(), nullptr, nullptr, &out.error, 0,      0};
  args.group = {row.data(),    tokens,      1,       1,       chunk,         chunks,
                ranges.data(), want.data(), nullptr, nullptr, states.data(), bins.data(),
                counts.data(), &out.error,  0};
  const auto step = [&](int blocks, auto&& body) {
    launch({blocks, 1, 1}, threads, sizeof(cuda::GroupShared), order,
           [&](HostCta& cta, void* shared) { body(cta, *static_cast<cuda::GroupShared*>(shared)); });
  };
  step(1, [&](HostCta& cta, auto&) { cuda::range_rows(cta, args, ranges.data(), want.data()); });
  for (int pass = 0; pass < 3; ++pass)
    step(chunks, [&](HostCta& cta, auto& shared) { cuda::count_digits(cta, args.group, pass, shared); });
  step(chunks, [&](HostCta& cta, auto& shared) { cuda::count_chunk(cta, args.group, shared); });
  step(chunks, [&](HostCta& cta, auto& shared) { cuda::write_chunk(cta, args, shared); });
  return out;
}

Order order_of(unsigned run) {
  return run % 3 == 0 ? Order::forward : run % 3 == 1 ? Order::backward : Order::shuffled;
}

}  // namespace

TEST_CASE("CUDA keys order scores as the CPU's keys do") {
  for (int kind = 0; kind < emulation::adversarial_count; ++kind)
    for (const float x : emulation::adversarial(kind, 200, 1)) {
      CHECK(cuda::ordered_key(x) == detail::ordered_key(x));
      CHECK(cuda::score_of_key(cuda::ordered_key(x)) == x);
    }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(cuda::is_nan_key(cuda::ordered_key(nan)));
  CHECK(cuda::is_nan_key(cuda::ordered_key(-nan)));
  CHECK_FALSE(cuda::is_nan_key(cuda::ordered_key(-std::numeric_limits<float>::infinity())));
  for (const std::uint32_t x : {0u, 1u, 2u, 3u, 255u, 256u, 0x7fffffffu, 0x80000000u, 0xffffffffu})
    CHECK(cuda::bit_width(x) == static_cast<int>(std::bit_width(x)));
}

TEST_CASE("digits split a range of keys into bins that cover it in order") {
  for (const cuda::KeyRange range : {cuda::KeyRange{-0x7f800000, 0x7f800000}, cuda::KeyRange{-5, 4000},
                                     cuda::KeyRange{0x7f7fffff, 0x7f800000}, cuda::KeyRange{-0x7fffffff, 0x7fffffff}}) {
    const int shift = range.shift();
    const std::uint32_t bins = (range.width() >> shift) + 1;
    CHECK(bins <= static_cast<std::uint32_t>(cuda::KeyRange::bins));
    CHECK(range.of_digit(0, shift).lo == range.lo);
    CHECK(range.of_digit(bins - 1, shift).hi == range.hi);
    for (const std::uint32_t b : {0u, bins / 2, bins - 1}) {
      const cuda::KeyRange part = range.of_digit(b, shift);
      CHECK(range.digit(part.lo, shift) == b);
      CHECK(range.digit(part.hi, shift) == b);
    }
  }
  for (const float x : {-3.5f, -0.f, 1e-40f, 7.25f}) {
    const std::uint32_t bits = cuda::FixedDigits::bits_of(cuda::ordered_key(x));
    std::uint32_t prefix = 0;
    for (int pass = 0; pass < 3; ++pass) {
      CHECK(cuda::FixedDigits::candidate(bits, prefix, pass));
      prefix |= cuda::FixedDigits::digit(bits, pass) << cuda::FixedDigits::shift(pass);
    }
    CHECK(cuda::FixedDigits::key_of(prefix) == cuda::ordered_key(x));
  }
}

TEST_CASE("error words keep the first fault whatever comes second") {
  const auto word = cuda::error_word(cuda::Fault::nan_score, 300, 2'000'000'000);
  CHECK(cuda::fault_of(word) == cuda::Fault::nan_score);
  CHECK(cuda::row_of(word) == 300);
  CHECK(cuda::token_of(word) == 2'000'000'000);
  CHECK(word < cuda::error_word(cuda::Fault::nan_score, 301, 0));
  CHECK(cuda::error_word(cuda::Fault::nan_score, 300, 5) < word);
  CHECK(cuda::fault_of(cuda::no_error) == cuda::Fault::none);
}

TEST_CASE("one block selects what the CPU selects, on every adversarial row and in every thread order") {
  unsigned seed = 0, run = 0;
  for (int kind = 0; kind < emulation::adversarial_count; ++kind)
    for (const int n : {1, 31, 33, 700}) {
      const auto row = emulation::adversarial(kind, n, ++seed);
      for (const index_t budget :
           {index_t{0}, index_t{1}, index_t{n / 7}, index_t{n / 2}, index_t{n - 1}, index_t{n}}) {
        constexpr index_t fits[] = {0, 300, 800};  // keys that fit into shared memory: none, some, all
        const index_t staged = fits[run / 3 % 3];
        const Order order = order_of(run++);
        INFO(emulation::adversarial_names[kind], ", ", n, " rows, budget ", budget, ", staged ", staged);
        const Selected got = on_device(row, budget, {}, staged, 96, order);
        CHECK(got.rows == on_host(row, budget, {}));
        CHECK(got.error == cuda::no_error);
      }
    }
}

TEST_CASE("protected rows are kept by one block as the CPU keeps them") {
  for (const ProtectShare share : {ProtectShare::half, ProtectShare::full, ProtectShare::score})
    for (const index_t budget : {1, 2, 5, 40, 99, 100, 101}) {
      const auto row = emulation::adversarial(3, 100, 5);
      const HeadProtect protect = protect_asked({4, 32, share}, 100);
      INFO("share ", static_cast<int>(share), ", budget ", budget);
      for (const Order order : {Order::forward, Order::backward, Order::shuffled})
        CHECK(on_device(row, budget, protect, 64, 64, order).rows == on_host(row, budget, protect));
      CHECK(on_blocks(row, budget, protect, 32, 64, Order::shuffled).rows == on_host(row, budget, protect));
    }
}

TEST_CASE("rows outside the evictable range and the newest ones stay on the device as on the CPU") {
  PlanOptions options;
  options.first = 20;
  options.last = 130;
  options.align = 16;
  options.recent = 40;
  for (const int n : {150, 100, 30, 10})
    for (const ProtectShare share : {ProtectShare::half, ProtectShare::full})
      for (const index_t own : {0, 3, 50}) {
        const HeadProtect asked = protect_asked({40, 8, share}, n, options.recent, options.range(n));
        const index_t budget = std::min(n, asked.outside() + asked.recent + own);
        INFO(n, " rows, budget ", budget);
        for (const int kind : {0, 3, 4}) {
          const auto row = emulation::adversarial(kind, n, static_cast<unsigned>(n + own));
          const auto want = on_host(row, budget, asked);
          CHECK(on_device(row, budget, asked, 64, 64, Order::shuffled).rows == want);
          CHECK(on_blocks(row, budget, asked, 32, 64, Order::backward).rows == want);
          for (index_t r = 0; r < n; ++r)
            if (r < asked.before || r >= n - asked.after - asked.recent)
              CHECK(std::binary_search(want.begin(), want.end(), r));
        }
      }
}

TEST_CASE("blocks that share a row select what the CPU selects") {
  unsigned seed = 0, run = 0;
  for (int kind = 0; kind < emulation::adversarial_count; ++kind)
    for (const int n : {1, 64, 500}) {
      const auto row = emulation::adversarial(kind, n, ++seed);
      for (const index_t budget : {index_t{0}, index_t{1}, index_t{n / 3}, index_t{n - 1}, index_t{n}}) {
        const Order order = order_of(run++);
        INFO(emulation::adversarial_names[kind], ", ", n, " rows, budget ", budget);
        const Selected got = on_blocks(row, budget, {}, 128, 64, order);
        CHECK(got.rows == on_host(row, budget, {}));
        CHECK(got.error == cuda::no_error);
      }
    }
}

TEST_CASE("16-bit scores select as their float values do") {
  const auto row = emulation::adversarial(1, 300, 9);
  std::vector<fp16_t> half;
  std::vector<bf16_t> brain;
  std::vector<float> half_values, brain_values;
  for (const float x : row) {
    half.push_back(from_float<fp16_t>(x));
    brain.push_back(from_float<bf16_t>(x));
    half_values.push_back(to_float(half.back()));
    brain_values.push_back(to_float(brain.back()));
  }
  CHECK(on_device(half, 50, {}, 100, 64, Order::shuffled).rows == on_host(half_values, 50, {}));
  CHECK(on_device(brain, 50, {}, 100, 64, Order::shuffled).rows == on_host(brain_values, 50, {}));
}

TEST_CASE("a NaN is flagged with its first token, protected rows are never read") {
  auto row = emulation::adversarial(0, 200, 3);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  row[150] = row[77] = nan;
  for (const auto& got :
       {on_device(row, 20, {}, 100, 64, Order::backward), on_blocks(row, 20, {}, 64, 64, Order::backward)}) {
    CHECK(cuda::fault_of(got.error) == cuda::Fault::nan_score);
    CHECK(cuda::token_of(got.error) == 77);
  }
  row[150] = row[77] = 0.f;
  row[0] = row[199] = nan;
  CHECK(on_device(row, 100, protect_asked({1, 32, ProtectShare::half}, 200), 100, 64, Order::forward).error ==
        cuda::no_error);
  CHECK(on_blocks(row, 100, protect_asked({1, 32, ProtectShare::half}, 200), 64, 64, Order::forward).error ==
        cuda::no_error);
  CHECK(on_device(row, 200, {}, 100, 64, Order::forward).error == cuda::no_error);
}

TEST_CASE("the cut of a row and the ties beyond it are reported") {
  const std::vector<float> row{1, 5, 3, 3, 9, 3};  // the best three: 9, 5 and the first 3
  const Selected got = on_device(row, 3, {}, 6, 32, Order::forward);
  CHECK(got.rows == std::vector<index_t>{1, 2, 4});
  CHECK(cuda::score_of_key(got.cut) == 3.f);
  CHECK(got.ties_left == 2);
}
