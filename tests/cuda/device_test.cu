// Correctness on a device, against the CPU backend. `--small` runs little of everything, for compute-sanitizer.
// Exit code 0: all checks passed; 1: some failed; 77: there is no device.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "adversarial.hpp"
#include "common/sharing.hpp"
#include "device_common.hpp"
#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cache/apply.hpp"
#include "kvevict/cuda/detail/select_sort.cuh"
#include "kvevict/cuda/key_scorers.cuh"
#include "kvevict/cuda/paged_cache.cuh"
#include "kvevict/cuda/planning.cuh"
#include "kvevict/cuda/token_network.cuh"
#include "kvevict/cuda/window_attention.cuh"
#include "kvevict/policy/policy.hpp"

// Inside the namespace: with CUB there is a ::cuda as well.
namespace kvevict {
namespace {

using cuda::DeviceArray;
using device::Model;
using device::Queries;

const cuda_exec gpu{};
bool small = false;
int checks = 0, failures = 0;

void expect(bool ok, const std::string& what) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

template <class T>
DeviceArray<T> up(const std::vector<T>& host) {
  return cuda::copied(gpu, std::span<const T>(host));
}

std::vector<index_t> host_select(const std::vector<float>& row, index_t budget, Protect protect) {
  std::vector<index_t> out(static_cast<std::size_t>(std::min<index_t>(budget, static_cast<index_t>(row.size()))));
  std::vector<std::byte> scratch(select_scratch_bytes(TopK{}, static_cast<index_t>(row.size())));
  select_row(TopK{}, row, budget, protect_asked(protect, static_cast<index_t>(row.size())), out, scratch);
  return out;
}

// All adversarial rows at once, a budget each, against the host; and against the sort.
void test_select() {
  std::vector<int> widths{1, 100, 3000};
  if (!small) widths.insert(widths.end(), {40'000, 150'000});
  for (const int width : widths)
    for (const Protect protect : {Protect{}, Protect{4, 32, ProtectShare::half}, Protect{1, 64, ProtectShare::full}}) {
      const index_t rows = emulation::adversarial_count * (small ? 1 : 3);
      std::vector<float> scores(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width));
      std::vector<index_t> tokens, budgets, want;
      std::vector<std::int64_t> offsets{0};
      for (index_t r = 0; r < rows; ++r) {
        const int n = r % 5 == 4 ? width / 2 : width;
        const auto row = emulation::adversarial(r % emulation::adversarial_count, n, static_cast<unsigned>(r + width));
        std::copy(row.begin(), row.end(), scores.begin() + std::int64_t{r} * width);
        tokens.push_back(n);
        budgets.push_back(r % 3 == 0 ? n / 7 : r % 3 == 1 ? n / 2 : n - 1);
        const auto kept = host_select(row, budgets.back(), protect);
        want.insert(want.end(), kept.begin(), kept.end());
        offsets.push_back(static_cast<std::int64_t>(want.size()));
      }
      const auto d_scores = up(scores);
      std::vector<HeadProtect> asked;
      for (const index_t t : tokens) asked.push_back(protect_asked(protect, t));
      const auto d_tokens = up(tokens), d_budgets = up(budgets);
      const auto d_asked = up(asked);
      DeviceArray<std::int64_t> d_offsets(gpu, rows + 1);
      cuda::ErrorFlag error(gpu);
      const cuda::ScoredRows in{d_scores.data(), width, rows, d_tokens.data(), width, 0};
      cuda::offsets(gpu, in.tokens, d_budgets.data(), rows, d_offsets.data());
      expect(cuda::downloaded(gpu, d_offsets.data(), rows + 1) == offsets, joined_text("offsets, width ", width));
      const auto run = [&](const char* name, auto&& select) {
        DeviceArray<index_t> out(gpu, static_cast<std::int64_t>(want.size()));
        select(out.data());
        expect(cuda::downloaded(gpu, out.data(), out.size()) == want,
               joined_text(name, ", width ", width, ", window ", protect.window));
        error.throw_if_set(gpu, name, 1);
      };
      for (const auto spread : {cuda::Spread::row_per_block, cuda::Spread::row_over_blocks})
        run(spread == cuda::Spread::row_per_block ? "select, row per block" : "select, row over blocks",
            [&](index_t* out) {
              cuda::select(gpu, in, d_budgets.data(), d_asked.data(), d_offsets.data(), out, error.word(), spread);
            });
      run("select by sort", [&](index_t* out) {
        cuda::select_by_sort(gpu, in, d_budgets.data(), d_asked.data(), d_offsets.data(), out, error.word());
      });
    }
}

void test_budgets() {
  for (int kind = 0; kind < emulation::adversarial_count; ++kind) {
    const index_t layers = 3, heads = 8, width = small ? 300 : 5000;
    std::vector<float> scores;
    std::vector<index_t> tokens;
    for (index_t r = 0; r < layers * heads; ++r) {
      const auto row = emulation::adversarial(kind, width, static_cast<unsigned>(100 * kind + r));
      scores.insert(scores.end(), row.begin(), row.end());
      tokens.push_back(r % 4 == 3 ? width / 3 : width);
    }
    const CacheShape shape{layers, heads, heads, 8, 8};
    Audit audit;
    const GrantedBudget granted = Budget::retain(0.17).resolve(tokens, 32, 1, audit);
    allocate::Ada<> ada;
    ada.normalize = Normalize::none;
    std::vector<std::int64_t> totals(static_cast<std::size_t>(layers));
    ada.layer_totals(shape, tokens, granted, totals, audit);
    const Protect protect{2, 32, ProtectShare::half};
    std::vector<index_t> want;
    cuda::SplitTables tables;
    for (index_t l = 0; l < layers; ++l) {
      const auto of_layer = layer_of(tokens, shape, l);
      const tests::Sharing sharing(l, {of_layer.begin(), of_layer.end()}, protect);
      const std::int64_t total = totals[static_cast<std::size_t>(l)];
      const auto rows = sharing.rows(ada, {scores.data() + shape.at(l, 0) * width, heads, width, width}, total, audit);
      want.insert(want.end(), rows.begin(), rows.end());
      tables.add(sharing.heads(), ada.split_layer(sharing.heads(), total));
    }
    const auto d_scores = up(scores);
    const auto d_tokens = up(tokens);
    const cuda::DeviceSplit split(gpu, tables);
    DeviceArray<index_t> budgets(gpu, layers * heads);
    cuda::ErrorFlag error(gpu);
    const cuda::ScoredRows in{d_scores.data(), width, layers * heads, d_tokens.data(), width, 0};
    cuda::split_rows(gpu, in, heads, split.from(0, 0), budgets.data(), error.word());
    expect(cuda::downloaded(gpu, budgets.data(), layers * heads) == want,
           joined_text("Ada-KV rows, ", emulation::adversarial_names[kind]));
    error.throw_if_set(gpu, "ada", heads);
  }
}

void expect_close(const std::vector<float>& got, const std::vector<float>& want, float tolerance,
                  const std::string& what) {
  float largest = 0.f, error = 0.f;
  bool same = true;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(want[i])) {
      same &= got[i] == want[i];
      continue;
    }
    largest = std::max(largest, std::abs(want[i]));
    same &= std::isfinite(got[i]);
    error = std::max(error, std::abs(got[i] - want[i]));
  }
  expect(same && error <= tolerance * largest, joined_text(what, ": error ", error, " of ", largest));
}

// A scorer on both sides. Columns past a head's tokens are left alone by both.
template <class T, class Scorer>
void compare_scores(const Model<T>& model, const Scorer& scorer, float tolerance, const std::string& what) {
  const CudaRaggedCache<T> cache(gpu, model);
  const Queries<T> queries(gpu, model);
  const auto host = model.observe(0);
  const auto device = model.observe(cache, queries.rows.data(), queries.positions.data(), 0);
  const LayerObservation<T> on_host = host.observation(), on_device = device.observation();
  const index_t rows = score_heads(scorer, model.shape()), width = on_host.most_tokens();
  std::vector<float> want(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width), -7.f);
  score_on(host_exec{4, nullptr}, scorer, on_host, Matrix<float>{want.data(), rows, width, width});
  DeviceArray<float> got = up(std::vector<float>(want.size(), -7.f));
  score_on(gpu, scorer, on_device, Matrix<float>{got.data(), rows, width, width});
  expect_close(cuda::downloaded(gpu, got.data(), got.size()), want, tolerance, what);
}

template <class T>
void test_scorers(const char* type, index_t dim, index_t group) {
  const std::vector<index_t> tokens =
      small ? std::vector<index_t>{200, 77} : std::vector<index_t>{3000, 2999, 517, 5, 0};
  const auto heads = static_cast<index_t>(tokens.size());
  const Model<T> model({1, heads, heads * group, dim, dim}, tokens, 64);
  const std::string name = joined_text(", ", type, ", d ", dim, ", group ", group);
  for (const index_t window : {32, 20})
    for (const Pooling pool : {Pooling::max(7), Pooling::avg(5), Pooling::none()})
      for (const GroupReduction reduction : {GroupReduction::mean, GroupReduction::max, GroupReduction::none}) {
        score::SnapKV scorer;
        scorer.window = window;
        scorer.pool = pool;
        scorer.group = reduction;
        scorer.order = window == 32 ? PoolOrder::group_then_pool : PoolOrder::pool_then_group;
        scorer.protect = window == 32 ? ProtectShare::half : ProtectShare::score;
        compare_scores(model, scorer, 1e-5f, "window scores" + name + ", " + specification(scorer));
        if (small) return;
      }
  compare_scores(model, score::KNorm{}, 1e-6f, "key norms" + name);
  compare_scores(model, score::KeyDiff{}, 1e-5f, "KeyDiff" + name);
  compare_scores(model, score::Position{{.sinks = 4, .protect = ProtectShare::score}}, 0.f, "positions" + name);
}

template <class T>
void test_tokens(const char* type, index_t dim, index_t hidden, KeyFrame frame, TokenFeatures features) {
  const Model<T> model({1, 2, 2, dim, dim}, small ? std::vector<index_t>{100, 60} : std::vector<index_t>{2500, 1201},
                       8);
  const TokenInput input{frame, features};
  const index_t inputs = 2 * dim + input.features_count();
  const auto w1 = device::noise<float>(2ll * inputs * hidden, 5, 0.1f),
             b1 = device::noise<float>(2ll * hidden, 6, 0.5f), w2 = device::noise<float>(2ll * hidden, 7, 0.3f);
  const auto net = [&](index_t h) {
    return TokenNet<const float>{inputs, hidden, w1.data() + std::int64_t{h} * inputs * hidden, b1.data() + h * hidden,
                                 w2.data() + h * hidden};
  };
  std::vector<float> inv_freq;
  for (index_t i = 0; i < dim / 2; ++i)
    inv_freq.push_back(std::pow(10'000.f, -2.f * static_cast<float>(i) / static_cast<float>(dim)));
  const CudaRaggedCache<T> cache(gpu, model);
  const Queries<T> queries(gpu, model);
  auto device = model.observe(cache, queries.rows.data(), queries.positions.data(), 0);
  device.rope.rotary_dim = dim;
  device.rope.inv_freq = inv_freq;
  const index_t width = model.tokens(0, 0);
  DeviceArray<float> got = up(std::vector<float>(2 * static_cast<std::size_t>(width), 0.f));
  const cuda::LayerTokenNets<T> nets(gpu, model.shape(), input, net);
  nets.score(gpu, device.observation(), model.newest(), Matrix<float>{got.data(), 2, width, width});
  std::vector<float> want(2 * static_cast<std::size_t>(width), 0.f);
  for (index_t h = 0; h < 2; ++h)
    for (index_t j = 0; j < model.tokens(0, h); ++j) {
      std::vector<double> x;
      const index_t p = model.positions(0, h)[static_cast<std::size_t>(j)];
      for (index_t c = 0; c < dim; ++c) x.push_back(to_float(model.keys(0, h).at(j, c)));
      for (index_t c = 0; frame == KeyFrame::pre_rope && c < dim / 2; ++c) {
        const double angle = static_cast<double>(p) * static_cast<double>(inv_freq[static_cast<std::size_t>(c)]);
        double &a = x[static_cast<std::size_t>(c)], &b = x[static_cast<std::size_t>(c + dim / 2)];
        const double u = a * std::cos(angle) + b * std::sin(angle), v = b * std::cos(angle) - a * std::sin(angle);
        a = u;
        b = v;
      }
      for (index_t c = 0; c < dim; ++c) x.push_back(to_float(model.values(0, h).at(j, c)));
      if (features == TokenFeatures::distance)
        for (const float f : distance_features(model.newest() - p)) x.push_back(f);
      double score = 0;
      const auto n = net(h);
      for (index_t u = 0; u < hidden; ++u) {
        double sum = n.b1[u];
        for (index_t i = 0; i < inputs; ++i)
          sum += x[static_cast<std::size_t>(i)] * static_cast<double>(n.w1[std::int64_t{i} * hidden + u]);
        score += static_cast<double>(n.w2[u]) * sum / (1 + std::exp(-sum));
      }
      want[static_cast<std::size_t>(h * width + j)] = static_cast<float>(score);
    }
  expect_close(
      cuda::downloaded(gpu, got.data(), got.size()), want, 1e-5f,
      joined_text("lkv-t, ", type, ", d ", dim, ", hidden ", hidden, ", pre-rope ", frame == KeyFrame::pre_rope));
}

template <class T>
std::vector<T> row_values(const cuda_exec& exec, const Rows<const T>& rows, const std::vector<index_t>& table) {
  std::vector<T> out;
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    const T* row = rows.blocks ? rows.data + table[static_cast<std::size_t>(r / rows.block_rows)] * rows.block_stride +
                                     r % rows.block_rows * rows.row_stride
                               : rows.row(r);
    const auto values = cuda::downloaded(exec, row, rows.cols);
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

template <class Cache, class T>
void expect_rows(const Cache& cache, const RaggedCache<T>& want, const char* what) {
  const CacheShape s = want.shape();
  bool same = cache.bytes_live() == want.bytes_live();
  for (index_t l = 0; l < s.layers; ++l)
    for (index_t h = 0; h < s.kv_heads; ++h) {
      same &= cache.tokens(l, h) == want.tokens(l, h);
      std::vector<index_t> table;
      if (cache.keys(l, h).blocks)
        table = cuda::downloaded(gpu, cache.keys(l, h).blocks,
                                 cuda::ceil_div(cache.tokens(l, h), cache.keys(l, h).block_rows));
      const auto host = [&](const Rows<const T>& rows) {
        std::vector<T> out;
        for (std::int64_t r = 0; r < rows.rows; ++r) out.insert(out.end(), rows.row(r), rows.row(r) + rows.cols);
        return out;
      };
      same &= row_values(gpu, cache.keys(l, h), table) == host(want.keys(l, h));
      same &= row_values(gpu, cache.values(l, h), table) == host(want.values(l, h));
      const auto p = cache.positions(l, h), q = want.positions(l, h);
      same &= cuda::downloaded(gpu, p.data(), std::ssize(p)) == std::vector<index_t>(q.begin(), q.end());
    }
  expect(same, what);
}

// Plans on the device, and what caches make of them.
template <class T>
void test_policies(index_t dim) {
  const index_t t = small ? 120 : 700;
  const CacheShape shape{2, 4, 8, dim, dim};
  const Model<T> model(shape, std::vector<index_t>(8, t), 32);
  const Queries<T> queries(gpu, model);
  const auto run = [&](const auto& policy, const char* what, bool exact_scores) {
    CudaRaggedCache<T> ragged(gpu, model);
    CudaPagedCache<T> paged(gpu, model);
    std::vector<OwnedObservation<T>> host, device;
    std::vector<LayerObservation<T>> host_views, device_views;
    for (index_t l = 0; l < shape.layers; ++l) {
      host.push_back(model.observe(l));
      device.push_back(model.observe(ragged, queries.rows.data(), queries.positions.data(), l));
    }
    for (index_t l = 0; l < shape.layers; ++l) {
      host_views.push_back(host[static_cast<std::size_t>(l)].observation());
      device_views.push_back(device[static_cast<std::size_t>(l)].observation());
    }
    const Budget budget = Budget::retain(0.2);
    const EvictionPlan want = policy.plan(host_exec{4, nullptr}, model, host_views, budget);
    const EvictionPlan got = policy.plan(gpu, ragged, std::span<const LayerObservation<T>>(device_views), budget);
    expect(
        got.specification == want.specification && got.asked == want.asked && got.granted.total == want.granted.total,
        joined_text(what, ": the plan says the same of itself"));
    if (exact_scores) expect(same_rows(got, want), joined_text(what, ": equal scores, equal plans"));
    expect(got.rows_kept() == want.rows_kept(), joined_text(what, ": rows kept"));

    // Layer by layer without a host plan, and the host plan applied.
    auto planner = policy.make_planner(gpu, shape, model.all_tokens(), budget);
    CudaRaggedCache<T> live(gpu, model);
    for (index_t l = 0; l < shape.layers; ++l)
      live.compact(gpu, l, planner.layer(gpu, device_views[static_cast<std::size_t>(l)]));
    planner.check(gpu);
    live.check(gpu);
    RaggedCache<T> expected(model);
    apply(host_exec{}, got, expected);
    apply(gpu, got, ragged);
    apply(gpu, got, paged);
    expect_rows(live, expected, "a ragged cache compacted by device plans");
    expect_rows(ragged, expected, "a ragged cache compacted by a host plan");
    expect_rows(paged, expected, "a paged cache");
    expect(ragged.bytes_reserved() == expected.bytes_live(), "a ragged cache gives memory back");
    if (got.offsets[1] * 8 == got.rows_kept()) {
      CudaDenseCache<T> dense(gpu, model);
      apply(gpu, got, dense);
      expect_rows(dense, expected, "a dense cache");
      for (index_t l = 0; l < shape.layers; ++l) dense.shrink_to_fit(gpu, l);
      expect_rows(dense, expected, "a dense cache after shrinking");
    }
  };
  run(Policy<allocate::Uniform, score::Position>{}, "streamingllm", true);
  run(Policy<allocate::Uniform, score::SnapKV>{}, "snapkv", false);
  run(Policy<allocate::Ada<allocate::Uniform>, score::SnapKV>{}, "adakv", false);
  run(Policy<allocate::Pyramid, score::KNorm>{}, "pyramid over key norms", false);
}

void test_errors() {
  const CacheShape shape{1, 2, 2, 16, 16};
  const Model<float> model(shape, {200, 200}, 8);
  const Queries<float> queries(gpu, model);
  CudaRaggedCache<float> cache(gpu, model);
  const float nan = std::nanf("");
  expect(
      cudaMemcpy(const_cast<float*>(cache.keys(0, 1).row(77)), &nan, sizeof nan, cudaMemcpyHostToDevice) == cudaSuccess,
      "copy");
  const auto device = model.observe(cache, queries.rows.data(), queries.positions.data(), 0);
  const std::vector<LayerObservation<float>> views{device.observation()};
  const Policy<allocate::Uniform, score::KNorm> knorm;
  std::string said;
  try {
    (void)knorm.plan(gpu, cache, std::span<const LayerObservation<float>>(views), Budget::retain(0.5));
  } catch (const std::domain_error& e) {
    said = e.what();
  }
  expect(said.find("layer 0, head 1, token 77 is NaN") != std::string::npos, "NaN: " + said);

  const auto offsets = up(std::vector<std::int64_t>{0, 2, 4});
  const auto rows = up(std::vector<index_t>{1, 1, 5, 300});
  bool refused = false;
  try {
    cache.compact(gpu, 0, LayerPlan{{offsets.span(), rows.span()}, {}});
    cache.check(gpu);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  expect(refused, "a device plan with a row twice is refused");
}

int run(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no CUDA device; nothing was run");
    return 77;
  }
  small = argc > 1 && std::strcmp(argv[1], "--small") == 0;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"select", test_select},
      {"budgets", test_budgets},
      {"scorers f16",
       [] {
         test_scorers<fp16_t>("f16", 128, 4);
         if (!small) {
           test_scorers<fp16_t>("f16", 64, 24);
           test_scorers<fp16_t>("f16", 80, 1);
           test_scorers<fp16_t>("f16", 36, 2);
         }
       }},
      {"scorers bf16",
       [] {
         test_scorers<bf16_t>("bf16", 128, 2);
         if (!small) test_scorers<bf16_t>("bf16", 256, 3);
       }},
      {"scorers f32",
       [] {
         test_scorers<float>("f32", 64, 3);
         if (!small) test_scorers<float>("f32", 128, 1);
       }},
      {"lkv-t",
       [] {
         test_tokens<fp16_t>("f16", 64, 48, KeyFrame::post_rope, TokenFeatures::none);
         if (small) return;
         test_tokens<fp16_t>("f16", 128, 128, KeyFrame::post_rope, TokenFeatures::distance);
         test_tokens<bf16_t>("bf16", 64, 64, KeyFrame::post_rope, TokenFeatures::none);
         test_tokens<float>("f32", 64, 20, KeyFrame::post_rope, TokenFeatures::distance);
         test_tokens<fp16_t>("f16", 64, 64, KeyFrame::pre_rope, TokenFeatures::distance);
       }},
      {"policies",
       [] {
         test_policies<fp16_t>(32);
         if (!small) test_policies<float>(20);
       }},
      {"errors", test_errors}};
  for (const auto& [name, test] : tests) {
    const int before = failures, count = checks;
    try {
      test();
    } catch (const std::exception& e) {
      expect(false, joined_text(name, ": ", e.what()));
    }
    std::printf("%-14s %4d checks, %d failed\n", name, checks - count, failures - before);
  }
  std::printf("device_test: %d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvevict

int main(int argc, char** argv) { return kvevict::run(argc, argv); }
