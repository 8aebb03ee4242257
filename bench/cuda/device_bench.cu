// Timings on a device, each beside the time that its bytes alone take at the bandwidth measured by the same program.
// Prints one table and writes JSON: device_bench FILE. Every result is checked by tests/cuda/device_test.cu, not here.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "adversarial.hpp"
#include "device_common.hpp"
#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cuda/detail/select_sort.cuh"
#include "kvevict/cuda/key_scorers.cuh"
#include "kvevict/cuda/planning.cuh"
#include "kvevict/cuda/window_attention.cuh"
#include "kvevict/policy/policy.hpp"

// Inside the namespace: with CUB there is a ::cuda as well.
namespace kvevict {
namespace {

using cuda::DeviceArray;

const cuda_exec gpu{};

struct Row {
  std::string name;
  double micros, bound, goal;  // goal 0: none
};
std::vector<Row> table;
double bytes_per_micro = 0;

// Median of single runs, each timed by events; caches are as the run before left them.
double time_of(int runs, const std::function<void()>& body) {
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  for (int i = 0; i < 3; ++i) body();
  std::vector<float> times;
  for (int i = 0; i < runs; ++i) {
    cuda::check(cudaEventRecord(start, gpu.stream), "event");
    body();
    cuda::check(cudaEventRecord(stop, gpu.stream), "event");
    cuda::check(cudaEventSynchronize(stop), "event");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
    times.push_back(ms * 1000);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const std::string& name, double bytes, double goal, int runs, const std::function<void()>& body) {
  const double micros = time_of(runs, body);
  table.push_back({name, micros, bytes / bytes_per_micro, goal});
  const Row& r = table.back();
  std::printf("%-46s %9.1f us %9.1f us %6.2f", name.c_str(), r.micros, r.bound, r.micros / r.bound);
  if (goal > 0) std::printf("  goal %.0f us: %s", goal, micros <= goal ? "met" : "not met");
  std::puts("");
}

template <class T>
DeviceArray<T> up(const std::vector<T>& host) {
  return cuda::copied(gpu, std::span<const T>(host));
}

void bandwidth() {
  const std::int64_t bytes = 1ll << 30;
  DeviceArray<unsigned char> a(gpu, bytes), b(gpu, bytes);
  const double micros = time_of(20, [&] {
    cuda::check(
        cudaMemcpyAsync(b.data(), a.data(), static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, gpu.stream),
        "copy");
  });
  bytes_per_micro = 2 * static_cast<double>(bytes) / micros;
  std::printf("device copy: %.0f GB/s read and written\n", bytes_per_micro / 1000);
  std::printf("%-46s %12s %12s %6s\n", "what", "time", "bytes alone", "ratio");
}

void selection() {
  const index_t rows = 256, width = 32 * 1024;
  const std::vector<index_t> tokens(rows, width), budgets(rows, width * 15 / 100);
  const auto d_tokens = up(tokens), d_budgets = up(budgets);
  const auto unprotected = up(std::vector<HeadProtect>(static_cast<std::size_t>(rows)));
  DeviceArray<std::int64_t> offsets(gpu, rows + 1);
  DeviceArray<index_t> out(gpu, std::int64_t{rows} * width);
  cuda::offsets(gpu, d_tokens.data(), d_budgets.data(), rows, offsets.data());
  cuda::ErrorFlag error(gpu);
  const double bytes = 4. * rows * width;
  for (const auto& [kind, name, goal] : {std::tuple{0, "lognormal", 20.}, std::tuple{4, "max-pooled runs", 0.},
                                         std::tuple{2, "all equal", 0.}, std::tuple{3, "two values", 0.}}) {
    std::vector<float> scores;
    for (index_t r = 0; r < rows; ++r) {
      const auto row = emulation::adversarial(kind, width, static_cast<unsigned>(r));
      scores.insert(scores.end(), row.begin(), row.end());
    }
    const auto d_scores = up(scores);
    const cuda::ScoredRows in{d_scores.data(), width, rows, d_tokens.data(), width, 0};
    measure(joined_text("select 256 x 32 Ki, ", name), bytes, goal, 50, [&] {
      cuda::select(gpu, in, d_budgets.data(), unprotected.data(), offsets.data(), out.data(), error.word());
    });
    if (kind != 0) continue;
    measure("select 256 x 32 Ki by segmented sort", bytes, 0, 10, [&] {
      cuda::select_by_sort(gpu, in, d_budgets.data(), unprotected.data(), offsets.data(), out.data(), error.word());
    });
    cuda::SplitTables tables;
    for (index_t l = 0; l < 32; ++l) {
      const std::vector<index_t> of_layer(8, width);
      const Protect protect{0, 32, ProtectShare::half};
      const std::vector<HeadProtect> asked(8, protect_asked(protect, width));
      const SharingHeads heads{l, of_layer, protect, asked, true};
      tables.add(heads, allocate::Ada<>{}.split_layer(heads, 8ll * budgets[0]));
    }
    const cuda::DeviceSplit split(gpu, tables);
    DeviceArray<index_t> shares(gpu, rows);
    measure("Ada-KV rows, 32 layers x 8 x 32 Ki", bytes, 0, 50,
            [&] { cuda::split_rows(gpu, in, 8, split.from(0, 0), shares.data(), error.word()); });
    const cuda::ScoredRows few{d_scores.data(), 16 * width, 16, d_tokens.data(), 16 * width, 0};
    const std::vector<index_t> long_tokens(16, 16 * width), long_budgets(16, 2 * width);
    const auto d_long = up(long_tokens), d_long_budgets = up(long_budgets);
    DeviceArray<std::int64_t> long_offsets(gpu, 17);
    cuda::offsets(gpu, d_long.data(), d_long_budgets.data(), 16, long_offsets.data());
    cuda::ScoredRows long_rows = few;
    long_rows.tokens = d_long.data();
    for (const auto spread : {cuda::Spread::row_over_blocks, cuda::Spread::row_per_block})
      measure(joined_text("select 16 x 512 Ki, ",
                          spread == cuda::Spread::row_over_blocks ? "row over blocks" : "row per block"),
              bytes, 0, 30, [&] {
                cuda::select(gpu, long_rows, d_long_budgets.data(), unprotected.data(), long_offsets.data(), out.data(),
                             error.word(), spread);
              });
  }
}

// Layers share one random layer of keys and values, at four addresses, so that the L2 cache holds none of them whole.
struct Layers {
  static constexpr index_t heads = 8, group = 4, dim = 128, tokens = 32 * 1024, window = 32;
  static constexpr int count = 4, layers = 32;
  std::vector<DeviceArray<fp16_t>> keys, values;
  DeviceArray<fp16_t> queries;
  DeviceArray<index_t> positions, window_positions;
  std::vector<OwnedObservation<fp16_t>> observed;

  Layers() {
    const std::int64_t rows = std::int64_t{heads} * tokens;
    const auto random = device::noise<fp16_t>(rows * dim, 3);
    for (int i = 0; i < count; ++i) {
      keys.push_back(up(random));
      values.push_back(up(random));
    }
    queries = up(device::noise<fp16_t>(std::int64_t{heads} * group * window * dim, 4, 2.f));
    std::vector<index_t> p(tokens), w(window);
    for (index_t i = 0; i < tokens; ++i) p[static_cast<std::size_t>(i)] = i;
    for (index_t i = 0; i < window; ++i) w[static_cast<std::size_t>(i)] = tokens - window + i;
    positions = up(p);
    window_positions = up(w);
    for (index_t l = 0; l < layers; ++l) {
      OwnedObservation<fp16_t> o;
      o.shape = {layers, heads, heads * group, dim, dim};
      o.layer = l;
      o.softmax_scale = 1.f / std::sqrt(static_cast<float>(dim));
      o.window_positions = window_positions.span();
      const auto slot = static_cast<std::size_t>(l % count);
      for (index_t h = 0; h < heads; ++h) {
        o.keys.push_back(dense_rows<const fp16_t>(keys[slot].data() + std::int64_t{h} * tokens * dim, tokens, dim));
        o.values.push_back(dense_rows<const fp16_t>(values[slot].data() + std::int64_t{h} * tokens * dim, tokens, dim));
        o.positions.push_back(positions.span());
      }
      for (index_t q = 0; q < heads * group; ++q)
        o.window_queries.push_back(
            dense_rows<const fp16_t>(queries.data() + std::int64_t{q} * window * dim, window, dim));
      observed.push_back(std::move(o));
    }
  }
};

void scoring(const Layers& layers) {
  const double key_bytes = 2. * Layers::layers * Layers::heads * Layers::tokens * Layers::dim;
  DeviceArray<float> out(gpu, std::int64_t{Layers::heads} * Layers::tokens);
  const Matrix<float> scores{out.data(), Layers::heads, Layers::tokens, Layers::tokens};
  const auto lse =
      up(std::vector<float>(static_cast<std::size_t>(Layers::heads * Layers::group * Layers::window), 12.f));
  for (const bool given : {true, false})
    measure(given ? "window scores, 32 x 8 x 32 Ki, lse given" : "window scores, 32 x 8 x 32 Ki, two passes", key_bytes,
            1000, 10, [&] {
              for (const auto& layer : layers.observed) {
                auto o = layer.observation();
                if (given) o.extras.lse = lse.span();
                score_on(gpu, score::SnapKV{}, o, scores);
              }
            });
  measure("key norms, 32 x 8 x 32 Ki", key_bytes, 0, 10, [&] {
    for (const auto& layer : layers.observed) score_on(gpu, score::KNorm{}, layer.observation(), scores);
  });
}

void compaction(Layers& layers) {
  const index_t kept = Layers::tokens * 15 / 100, heads = Layers::heads;
  std::vector<index_t> rows;
  std::vector<std::int64_t> offsets{0};
  for (index_t h = 0; h < heads; ++h) {
    for (index_t i = 0; i < kept; ++i) rows.push_back(static_cast<index_t>(std::int64_t{i} * Layers::tokens / kept));
    offsets.push_back(static_cast<std::int64_t>(rows.size()));
  }
  const auto d_rows = up(rows);
  const auto d_offsets = up(offsets);
  const auto d_tokens = up(std::vector<index_t>(static_cast<std::size_t>(heads), Layers::tokens));
  const cuda::KeepRows keep{d_offsets.data(), d_rows.data(), d_rows.size(), d_tokens.data()};
  const std::int64_t row_bytes = Layers::dim * 2;
  const double bytes = 2. * 2 * Layers::layers * static_cast<double>(rows.size()) * static_cast<double>(row_bytes);
  DeviceArray<unsigned char> kept_keys(gpu, d_rows.size() * row_bytes), kept_values(gpu, d_rows.size() * row_bytes);
  const auto parts = [&](int l, bool in_place) {
    const auto slot = static_cast<std::size_t>(l % Layers::count);
    std::array<cuda::MoveRows, 2> out;
    for (std::size_t i = 0; i < 2; ++i) {
      auto* from = reinterpret_cast<unsigned char*>((i == 0 ? layers.keys : layers.values)[slot].data());
      out[i].from = {from, row_bytes, Layers::tokens, nullptr, nullptr, 0, 0};
      out[i].to = in_place
                      ? out[i].from
                      : cuda::RowStore{
                            (i == 0 ? kept_keys : kept_values).data(), row_bytes, 0, d_offsets.data(), nullptr, 0, 0};
    }
    return out;
  };
  const double copy = time_of(10, [&] {
    for (int l = 0; l < Layers::layers; ++l) {
      const auto slot = static_cast<std::size_t>(l % Layers::count);
      const auto size = static_cast<std::size_t>(kept_keys.size());
      cuda::check(
          cudaMemcpyAsync(kept_keys.data(), layers.keys[slot].data(), size, cudaMemcpyDeviceToDevice, gpu.stream),
          "copy");
      cuda::check(
          cudaMemcpyAsync(kept_values.data(), layers.values[slot].data(), size, cudaMemcpyDeviceToDevice, gpu.stream),
          "copy");
    }
  });
  table.push_back({"device copy of the kept bytes, 32 layers", copy, bytes / bytes_per_micro, 0});
  std::printf("%-46s %9.1f us\n", table.back().name.c_str(), copy);
  measure("compaction in place, 32 x 8, 15 % of 32 Ki", bytes, 1.3 * copy, 10, [&] {
    for (int l = 0; l < Layers::layers; ++l) cuda::compact_rows(gpu, keep, heads, parts(l, true));
  });
  measure("compaction into new memory, 32 x 8", bytes, 1.3 * copy, 10, [&] {
    for (int l = 0; l < Layers::layers; ++l) cuda::gather_rows(gpu, keep, heads, d_rows.size(), parts(l, false));
  });
}

// Scores, rows, indices and compaction into new memory, layer after layer, without waiting in between.
void end_to_end(const Layers& layers) {
  const CacheShape shape = layers.observed[0].shape;
  const std::vector<index_t> tokens(static_cast<std::size_t>(shape.heads_total()), Layers::tokens);
  const auto d_tokens = up(std::vector<index_t>(static_cast<std::size_t>(Layers::heads), Layers::tokens));
  const std::int64_t row_bytes = Layers::dim * 2;
  DeviceArray<unsigned char> kept(gpu, std::int64_t{Layers::heads} * Layers::tokens * row_bytes);
  const double bytes = 2. * Layers::layers * Layers::heads * Layers::tokens * Layers::dim +
                       2. * 2 * 0.15 * Layers::layers * Layers::heads * Layers::tokens * static_cast<double>(row_bytes);
  const auto run = [&](const char* name, const auto& policy) {
    measure(name, bytes, 0, 5, [&] {
      auto planner = policy.make_planner(gpu, shape, tokens, Budget::retain(0.15));
      for (int l = 0; l < Layers::layers; ++l) {
        const auto slot = static_cast<std::size_t>(l % Layers::count);
        const LayerPlan plan = planner.layer(gpu, layers.observed[static_cast<std::size_t>(l)].observation());
        const cuda::KeepRows keep{plan.keep.offsets.data(), plan.keep.rows.data(), std::ssize(plan.keep.rows),
                                  d_tokens.data()};
        const auto part = [&](const DeviceArray<fp16_t>& from) {
          auto* data = reinterpret_cast<unsigned char*>(const_cast<fp16_t*>(from.data()));
          return cuda::MoveRows{{data, row_bytes, Layers::tokens, nullptr, nullptr, 0, 0},
                                {kept.data(), row_bytes, 0, plan.keep.offsets.data(), nullptr, 0, 0}};
        };
        const cuda::MoveRows parts[] = {part(layers.keys[slot]), part(layers.values[slot])};
        cuda::gather_rows(gpu, keep, Layers::heads, keep.listed, parts);
      }
    });
  };
  run("SnapKV end to end, 32 x 8 x 32 Ki", Policy<allocate::Uniform, score::SnapKV>{});
  run("Ada-KV end to end, 32 x 8 x 32 Ki", Policy<allocate::Ada<allocate::Uniform>, score::SnapKV>{});
}

void write_json(const char* path) {
  cudaDeviceProp device{};
  cuda::check(cudaGetDeviceProperties(&device, 0), "device");
  std::FILE* file = std::fopen(path, "w");
  if (!file) throw std::runtime_error(joined_text("cannot write ", path));
  std::fprintf(file,
               "{\"format\":\"kvevict-device-bench\",\"version\":1,\"device\":\"%s\",\"copy_gb_per_s\":%.1f,\"rows\":[",
               device.name, bytes_per_micro / 1000);
  for (std::size_t i = 0; i < table.size(); ++i)
    std::fprintf(file, "%s\n{\"name\":\"%s\",\"us\":%.2f,\"bytes_us\":%.2f,\"goal_us\":%.2f}", i == 0 ? "" : ",",
                 table[i].name.c_str(), table[i].micros, table[i].bound, table[i].goal);
  std::fputs("\n]}\n", file);
  if (std::fclose(file) != 0) throw std::runtime_error(joined_text("cannot write ", path));
}

int run(int argc, char** argv) try {
  if (argc != 2) {
    std::fputs("usage: device_bench FILE.json\n", stderr);
    return 2;
  }
  bandwidth();
  selection();
  Layers layers;
  scoring(layers);
  end_to_end(layers);
  compaction(layers);  // last: it moves the keys
  write_json(argv[1]);
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "device_bench: %s\n", e.what());
  return 1;
}

}  // namespace
}  // namespace kvevict

int main(int argc, char** argv) { return kvevict::run(argc, argv); }
