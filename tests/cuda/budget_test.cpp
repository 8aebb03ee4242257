// Rows per head on the device, in the emulated block, against the host allocators.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "adversarial.hpp"
#include "host_cta.hpp"
#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cuda/detail/budget_steps.hpp"

using namespace kvevict;
using emulation::HostCta;
using emulation::launch;
using emulation::Order;

namespace {

struct Heads {
  index_t layers, heads;
  std::vector<index_t> tokens;
  std::vector<float> scores;  // [layers * heads][width]
  index_t width;
};

Heads make_heads(index_t layers, index_t heads, index_t width, int kind, unsigned seed, bool ragged) {
  std::mt19937 random(seed);
  Heads out{layers, heads, {}, {}, width};
  for (index_t r = 0; r < layers * heads; ++r) {
    const auto row = emulation::adversarial(kind, width, seed * 100 + static_cast<unsigned>(r));
    out.scores.insert(out.scores.end(), row.begin(), row.end());
    out.tokens.push_back(ragged ? static_cast<index_t>(random() % static_cast<unsigned>(width + 1)) : width);
  }
  return out;
}

// Ada-KV as the launches of select.cuh run it.
std::vector<index_t> ada_on_device(const Heads& in, const std::vector<std::int64_t>& totals, Protect protect,
                                   std::int64_t millionths, Order order) {
  const index_t rows = in.layers * in.heads, chunk = 64, chunks = std::max<index_t>(1, cuda::ceil_div(in.width, chunk));
  const auto n = static_cast<std::size_t>(rows);
  unsigned long long error = cuda::no_error;
  std::vector<index_t> reserved(n), budgets(n, -1), extra(n);
  std::vector<std::int32_t> ceilings(n);
  std::vector<cuda::RankedRange> ranges(n);
  std::vector<std::uint32_t> want(static_cast<std::size_t>(in.layers));
  std::vector<cuda::GroupState> states(4 * static_cast<std::size_t>(in.layers));
  std::vector<std::uint32_t> bins(3 * static_cast<std::size_t>(in.layers) * cuda::FixedDigits::bins, 0);
  std::vector<cuda::ChunkCounts> counts(n * static_cast<std::size_t>(chunks));
  const cuda::AdaArgs ada{in.tokens.data(), in.layers,     in.heads,    protect,        totals.data(), millionths, 0,
                          reserved.data(),  ranges.data(), want.data(), budgets.data(), &error,        0};
  const cuda::SelectArgs<float> reserve{in.scores.data(),
                                        in.width,
                                        in.tokens.data(),
                                        reserved.data(),
                                        protect,
                                        totals.data(),
                                        in.heads,
                                        true,
                                        nullptr,
                                        nullptr,
                                        ceilings.data(),
                                        extra.data(),
                                        &error,
                                        0,
                                        40};
  const cuda::GroupArgs group{in.scores.data(), in.width,      rows,          in.heads,        chunk,
                              chunks,           ranges.data(), want.data(),   ceilings.data(), extra.data(),
                              states.data(),    bins.data(),   counts.data(), &error,          0};
  launch({in.layers, 1, 1}, 32, sizeof(cuda::AdaShared), order,
         [&](HostCta& cta, void* shared) { cuda::reserve_rows(cta, ada, *static_cast<cuda::AdaShared*>(shared)); });
  launch({rows, 1, 1}, 64, sizeof(cuda::SelectShared) + 40 * sizeof(std::int32_t), order,
         [&](HostCta& cta, void* shared) {
           auto* s = static_cast<cuda::SelectShared*>(shared);
           cuda::select_row(cta, reserve, *s, reinterpret_cast<std::int32_t*>(s + 1));
         });
  for (int pass = 0; pass < 3; ++pass)
    launch({chunks, rows, 1}, 64, sizeof(cuda::GroupShared), order, [&](HostCta& cta, void* shared) {
      cuda::count_digits(cta, group, pass, *static_cast<cuda::GroupShared*>(shared));
    });
  launch({chunks, rows, 1}, 64, sizeof(cuda::GroupShared), order,
         [&](HostCta& cta, void* shared) { cuda::count_chunk(cta, group, *static_cast<cuda::GroupShared*>(shared)); });
  launch({in.layers, 1, 1}, 32, sizeof(cuda::AdaShared), order, [&](HostCta& cta, void* shared) {
    cuda::share_rows(cta, ada, group, *static_cast<cuda::AdaShared*>(shared));
  });
  CHECK(error == cuda::no_error);
  return budgets;
}

std::vector<index_t> ada_on_host(const Heads& in, const std::vector<std::int64_t>& totals, Protect protect,
                                 double floor) {
  std::vector<index_t> out(in.tokens.size());
  Audit audit;
  allocate::Ada<> ada;
  ada.floor = floor;
  ada.normalize = Normalize::none;
  for (index_t l = 0; l < in.layers; ++l) {
    const auto first = static_cast<std::size_t>(l * in.heads);
    const LayerScores layer{
        l,
        {in.scores.data() + static_cast<std::int64_t>(first) * in.width, in.heads, in.width, in.width},
        std::span(in.tokens).subspan(first, static_cast<std::size_t>(in.heads)),
        protect,
        true};
    ada.allocate_layer(host_exec{}, layer, totals[static_cast<std::size_t>(l)],
                       std::span(out).subspan(first, static_cast<std::size_t>(in.heads)), audit);
  }
  return out;
}

std::vector<index_t> uniform_on_device(const std::vector<index_t>& tokens, std::int64_t total, std::int64_t millionths,
                                       bool exact, Order order) {
  std::vector<index_t> out(tokens.size(), -1);
  const cuda::UniformArgs args{tokens.data(), static_cast<index_t>(tokens.size()), total, millionths, exact,
                               out.data()};
  launch({}, 64, sizeof(cuda::UniformShared), order, [&](HostCta& cta, void* shared) {
    cuda::uniform_budgets(cta, args, *static_cast<cuda::UniformShared*>(shared));
  });
  return out;
}

}  // namespace

TEST_CASE("CUDA uniform rows equal the host allocator's, floors and exact sums, ragged heads and minima included") {
  for (const bool exact : {false, true})
    for (const double retain : {0.01, 0.05, 0.29, 0.5, 1.0})
      for (const auto& tokens : {std::vector<index_t>(70, 100), std::vector<index_t>{1, 2, 3, 400, 0, 7},
                                 std::vector<index_t>{0, 0}, std::vector<index_t>{2'097'152, 2'097'151, 1}}) {
        const CacheShape shape{1, static_cast<index_t>(tokens.size()), static_cast<index_t>(tokens.size()), 8, 8};
        Audit audit;
        const GrantedBudget granted = Budget::retain(retain).resolve(tokens, 32, 1, audit);
        std::vector<index_t> want(tokens.size());
        allocate::Uniform uniform;
        uniform.exact = exact;
        uniform.allocate(shape, tokens, granted, {want.data(), 1, shape.kv_heads, shape.kv_heads}, audit);
        INFO("retain ", retain, ", exact ", exact, ", heads ", tokens.size());
        CHECK(uniform_on_device(tokens, granted.total, 0, exact, Order::backward) == want);
        CHECK(uniform_on_device(tokens, -1, std::llround(retain * 1e6), exact, Order::shuffled) == want);
      }
}

TEST_CASE("CUDA set-aside and reserved rows equal the host's for every small head") {
  for (const ProtectShare share : {ProtectShare::half, ProtectShare::full, ProtectShare::score})
    for (index_t tokens = 0; tokens < 40; tokens += 3)
      for (std::int64_t total = 1; total < 80; total += 7)
        for (const std::int64_t heads : {1, 3, 8}) {
          const Protect protect{2, 8, share};
          const auto a = cuda::set_aside(protect, tokens, total, heads),
                     b = detail::set_aside(protect, tokens, total, heads);
          CHECK(a.sinks == b.sinks);
          CHECK(a.newest == b.newest);
          CHECK(cuda::ada_reserve(total, heads, 200'000) ==
                std::max<std::int64_t>(1, scaled_floor(total, 200'000, heads * 1'000'000)));
        }
}

TEST_CASE("CUDA Ada-KV gives each head the host's rows, ties between heads included, and meets the layer total") {
  unsigned seed = 0;
  for (int kind = 0; kind < emulation::adversarial_count; ++kind)
    for (const bool ragged : {false, true})
      for (int pick = 0; pick < 2; ++pick) {
        constexpr std::pair<double, double> rules[] = {{0.1, 0.2}, {0.5, 0.8}, {0.3, 1.0}, {1.0, 0.2}, {0.2, 0.0}};
        const double total_share = rules[seed % 5].first, floor = rules[seed % 5].second;
        const Heads in = make_heads(2, 5, 150, kind, ++seed, ragged);
        std::vector<std::int64_t> totals;
        for (index_t l = 0; l < 2; ++l) {
          std::int64_t held = 0;
          for (index_t h = 0; h < 5; ++h) held += in.tokens[static_cast<std::size_t>(l * 5 + h)];
          totals.push_back(
              std::max<std::int64_t>(5, static_cast<std::int64_t>(total_share * static_cast<double>(held))));
        }
        const Protect protects[] = {{}, {1, 8, ProtectShare::half}, {2, 16, ProtectShare::full}};
        const Protect protect = protects[seed % 3];
        INFO(emulation::adversarial_names[kind], ", ragged ", ragged, ", share ", total_share, ", floor ", floor,
             ", window ", protect.window);
        const auto got = ada_on_device(in, totals, protect, std::llround(floor * 1e6),
                                       seed % 4 < 2 ? Order::shuffled : Order::backward);
        CHECK(got == ada_on_host(in, totals, protect, floor));
      }
}

TEST_CASE("offsets are the running sum of what each row keeps, beyond 2^31 rows too") {
  std::vector<index_t> tokens(1100, 2'097'152), budgets(1100, 2'097'152);
  tokens[3] = 10;
  budgets[5] = -1;
  std::vector<std::int64_t> offsets(1101, -1);
  const cuda::OffsetArgs args{tokens.data(), budgets.data(), 1100, offsets.data()};
  launch({}, 256, sizeof(cuda::OffsetShared), Order::shuffled,
         [&](HostCta& cta, void* shared) { cuda::scan_offsets(cta, args, *static_cast<cuda::OffsetShared*>(shared)); });
  CHECK(offsets[0] == 0);
  CHECK(offsets[4] == 3 * 2'097'152ll + 10);
  CHECK(offsets[6] == offsets[5]);
  CHECK(offsets[1100] == 1098 * 2'097'152ll + 10);
}
