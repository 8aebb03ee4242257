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
#include "common/sharing.hpp"
#include "host_cta.hpp"
#include "kvevict/allocate/ada.hpp"
#include "kvevict/cpu/split_rows.hpp"
#include "kvevict/cuda/detail/split_steps.hpp"
#include "kvevict/cuda/detail/split_tables.hpp"
#include "kvevict/plan/plan_options.hpp"

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

// One layer's heads, what is shared there and how.
struct SharedLayer {
  tests::Sharing sharing;
  ScoreSplit split;  // without shares where every row stays
};

std::vector<SharedLayer> layers_of(const Heads& in, const std::vector<std::int64_t>& totals, Protect protect,
                                   double floor) {
  allocate::Ada<> ada;
  ada.floor = floor;
  ada.normalize = Normalize::none;
  std::vector<SharedLayer> out;
  for (index_t l = 0; l < in.layers; ++l) {
    const auto tokens = slice(in.tokens, l * in.heads, in.heads);
    SharedLayer& layer = out.emplace_back(SharedLayer{{l, {tokens.begin(), tokens.end()}, protect}, {}});
    const std::int64_t total = totals[static_cast<std::size_t>(l)];
    if (total < layer.sharing.held()) layer.split = ada.split_layer(layer.sharing.heads(), total);
  }
  return out;
}

// As the launches of split_rows.cuh run it.
std::vector<index_t> shared_on_device(const Heads& in, const std::vector<SharedLayer>& layers, Order order) {
  const index_t rows = in.layers * in.heads, chunk = 64, chunks = std::max<index_t>(1, cuda::ceil_div(in.width, chunk));
  const auto n = static_cast<std::size_t>(rows);
  unsigned long long error = cuda::no_error;
  cuda::SplitTables tables;
  for (const SharedLayer& l : layers) tables.add(l.sharing.heads(), l.split);
  std::vector<index_t> budgets(n, -1), extra(n);
  std::vector<std::int32_t> ceilings(n);
  std::vector<cuda::GroupState> states(4 * static_cast<std::size_t>(in.layers));
  std::vector<std::uint32_t> bins(3 * static_cast<std::size_t>(in.layers) * cuda::FixedDigits::bins, 0);
  std::vector<cuda::ChunkCounts> counts(n * static_cast<std::size_t>(chunks));
  cuda::SelectArgs<float> reserve{};
  reserve.scores = in.scores.data();
  reserve.row_stride = in.width;
  reserve.tokens = in.tokens.data();
  reserve.budgets = tables.reserved.data();
  reserve.protections = tables.protections.data();
  reserve.reserving = true;
  reserve.cut_keys = ceilings.data();
  reserve.ties_left = extra.data();
  reserve.error = &error;
  reserve.staged = 40;
  const cuda::GroupArgs group{in.scores.data(),
                              in.width,
                              rows,
                              in.heads,
                              chunk,
                              chunks,
                              tables.ranges.data(),
                              tables.want.data(),
                              ceilings.data(),
                              extra.data(),
                              states.data(),
                              bins.data(),
                              counts.data(),
                              &error,
                              0};
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
  const cuda::ShareArgs share{in.heads, tables.reserved.data(), budgets.data()};
  launch({in.layers, 1, 1}, 32, sizeof(cuda::ShareShared), order, [&](HostCta& cta, void* shared) {
    cuda::share_rows(cta, share, group, *static_cast<cuda::ShareShared*>(shared));
  });
  CHECK(error == cuda::no_error);
  return budgets;
}

// All rows that stay, those outside the range included.
std::vector<index_t> shared_on_host(const Heads& in, const std::vector<SharedLayer>& layers) {
  std::vector<index_t> out;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const tests::Sharing& sharing = layers[l].sharing;
    std::vector<index_t> rows = sharing.tokens;
    if (!layers[l].split.shares.empty())
      split_rows(host_exec{},
                 {in.scores.data() + static_cast<std::int64_t>(l) * in.heads * in.width, in.heads, in.width, in.width},
                 sharing.heads(), layers[l].split, rows);
    for (std::size_t h = 0; h < rows.size(); ++h) out.push_back(rows[h] + sharing.protections[h].outside());
  }
  return out;
}

}  // namespace

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
        const auto layers = layers_of(in, totals, protect, floor);
        const auto got = shared_on_device(in, layers, seed % 4 < 2 ? Order::shuffled : Order::backward);
        CHECK(got == shared_on_host(in, layers));
        for (std::size_t l = 0; l < 2; ++l)
          CHECK(std::accumulate(got.begin() + static_cast<std::ptrdiff_t>(5 * l),
                                got.begin() + static_cast<std::ptrdiff_t>(5 * l + 5),
                                std::int64_t{0}) == std::min(totals[l], layers[l].sharing.held()));
      }
}

TEST_CASE("CUDA heads share the rows of an evictable range, and their newest rows are guaranteed") {
  for (int kind = 0; kind < emulation::adversarial_count; ++kind) {
    const Heads in = make_heads(2, 4, 120, kind, static_cast<unsigned>(kind) + 50, kind % 2 == 0);
    PlanOptions options;
    options.first = 10;
    options.last = 110;
    options.align = 8;
    options.recent = 20;
    std::vector<SharedLayer> layers;
    for (index_t l = 0; l < in.layers; ++l) {
      const Protect protect{12, 16, ProtectShare::half};
      std::vector<index_t> evictable;
      std::vector<HeadProtect> protections;
      std::int64_t held = 0, recent = 0;
      for (const index_t t : slice(in.tokens, l * in.heads, in.heads)) {
        evictable.push_back(options.range(t).size());
        protections.push_back(protect_asked(protect, t, options.recent, options.range(t)));
        held += evictable.back();
        recent += protections.back().recent;
      }
      SharedLayer& layer = layers.emplace_back(SharedLayer{{l, evictable, protect}, {}});
      layer.sharing.protections = protections;
      const std::int64_t total = std::max<std::int64_t>({recent, 4, held / 3});
      allocate::Ada<> ada;
      ada.normalize = Normalize::none;
      if (total < held) layer.split = ada.split_layer(layer.sharing.heads(), total);
    }
    INFO(emulation::adversarial_names[kind]);
    const auto got = shared_on_device(in, layers, Order::shuffled);
    CHECK(got == shared_on_host(in, layers));
    for (std::size_t i = 0; i < got.size(); ++i) {
      const HeadProtect& p = layers[i / 4].sharing.protections[i % 4];
      CHECK(got[i] >= p.outside() + p.recent);
    }
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
