// The checkpoint file, the allocator `lkv-h` and the scorer `lkv-t` that read it.
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/cpu/token_network.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvevict/lkv/lkv_h.hpp"
#include "kvevict/lkv/lkv_t.hpp"

using namespace kvevict;

namespace {

// Weights for a small model, and the file that holds them (removed at the end).
struct Weights {
  LkvSizes sizes{2, 3, 8, 6, {}, 5, 4, 20};
  std::vector<float> embedding, w1, b1, w2, token_w1, token_b1, token_w2, head_length;
  std::string path;

  explicit Weights(TokenInput input = {}, unsigned seed = 1, index_t hidden = 20) {
    static int files = 0;
    path = (std::filesystem::temp_directory_path() /
            ("kvevict-checkpoint-test-" + std::to_string(reinterpret_cast<std::uintptr_t>(&files)) + "-" +
             std::to_string(files++)))
               .string();
    sizes.input = input;
    sizes.token_hidden = hidden;
    std::mt19937 random(seed);
    std::normal_distribution<float> draw;
    const auto fill = [&](std::int64_t n, float scale) {
      std::vector<float> x(static_cast<std::size_t>(n));
      for (auto& v : x) v = scale * draw(random);
      return x;
    };
    const std::int64_t heads = sizes.heads();
    embedding = fill(heads * 5, 1);
    w1 = fill(5 * 4, 1);
    b1 = fill(4, 1);
    w2 = fill(4, 1);
    token_w1 = fill(heads * sizes.token_inputs() * hidden, 0.3f);
    token_b1 = fill(heads * hidden, 0.3f);
    token_w2 = fill(heads * hidden, 0.3f);
  }
  ~Weights() { std::filesystem::remove(path); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  LkvTensors tensors() const { return {embedding, w1, b1, w2, token_w1, token_b1, token_w2, head_length}; }
  void write(bool half = false) const {
    write_lkv_checkpoint(path, sizes, tensors(), {{"model", "small"}, {"recipe", "steps=3"}}, half);
  }
  CacheShape shape() const { return {2, 3, 6, 8, 6}; }
};

// One layer of random rows in a cache of type T, strided, with its own positions.
template <class T>
struct Layer {
  std::vector<T> keys, values;
  std::vector<std::vector<index_t>> positions;
  std::vector<float> inv_freq{1.f, 0.1f, 0.01f};
  OwnedObservation<T> observed;
  index_t tokens[3];

  explicit Layer(const CacheShape& shape, index_t most = 401, index_t layer = 1) : tokens{most, most - 7, 5} {
    std::mt19937 random(5);
    std::normal_distribution<float> draw;
    const index_t ks = shape.head_dim_k + 3, vs = shape.head_dim_v + 1;
    for (index_t i = 0; i < 3 * most * ks; ++i) keys.push_back(from_float<T>(draw(random)));
    for (index_t i = 0; i < 3 * most * vs; ++i) values.push_back(from_float<T>(draw(random)));
    positions.resize(3);
    observed.shape = shape;
    observed.layer = layer;
    observed.rope = {RopeStyle::half, 6, inv_freq, 1.f};
    for (index_t h = 0; h < 3; ++h) {
      auto& p = positions[static_cast<std::size_t>(h)];
      for (index_t i = 0; i < tokens[h]; ++i) p.push_back(2 * i + h);
      observed.keys.push_back({keys.data() + std::int64_t{h} * most * ks, tokens[h], shape.head_dim_k, ks});
      observed.values.push_back({values.data() + std::int64_t{h} * most * vs, tokens[h], shape.head_dim_v, vs});
    }
    for (const auto& p : positions) observed.positions.emplace_back(p);
  }
};

// The network in double, straight from its definition.
template <class T>
double plain_score(const Weights& w, const Layer<T>& x, index_t head, index_t token) {
  const auto& o = x.observed;
  const auto h = static_cast<std::size_t>(head);
  std::vector<double> in;
  for (index_t c = 0; c < 8; ++c) in.push_back(static_cast<double>(to_float(o.keys[h].at(token, c))));
  const index_t position = x.positions[h][static_cast<std::size_t>(token)];
  if (w.sizes.input.key_frame == KeyFrame::pre_rope)
    for (std::size_t i = 0; i < 3; ++i) {
      const bool half = o.rope.style == RopeStyle::half;
      const std::size_t a = half ? i : 2 * i, b = half ? i + 3 : 2 * i + 1;
      const double angle = static_cast<double>(position) * static_cast<double>(x.inv_freq[i]);
      const double p = in[a], q = in[b], f = static_cast<double>(o.rope.attention_factor);
      in[a] = (p * std::cos(angle) + q * std::sin(angle)) / f;
      in[b] = (q * std::cos(angle) - p * std::sin(angle)) / f;
    }
  for (index_t c = 0; c < 6; ++c) in.push_back(static_cast<double>(to_float(o.values[h].at(token, c))));
  if (w.sizes.input.features == TokenFeatures::distance) {
    const double d = 2 * (x.tokens[0] - 1) - position;
    in.push_back(std::log(1 + d) / 2 - 2);
    in.push_back(3 * std::exp(-d / 16));
  }
  const auto hidden = static_cast<std::size_t>(w.sizes.token_hidden);
  const std::size_t at = static_cast<std::size_t>(o.layer) * 3 + h;
  double score = 0;
  for (std::size_t j = 0; j < hidden; ++j) {
    auto z = static_cast<double>(w.token_b1[at * hidden + j]);
    for (std::size_t i = 0; i < in.size(); ++i)
      z += in[i] * static_cast<double>(w.token_w1[(at * in.size() + i) * hidden + j]);
    score += z / (1 + std::exp(-z)) * static_cast<double>(w.token_w2[at * hidden + j]);
  }
  return score;
}

template <class T>
std::vector<float> scored(const std::string& path, const Layer<T>& x, int threads = 1) {
  std::vector<float> out(static_cast<std::size_t>(3 * x.tokens[0]), -77.f);
  score_on(host_exec{threads}, score::LkvT{LkvFile(path)}, x.observed.observation(),
           {out.data(), 3, x.tokens[0], x.tokens[0]});
  return out;
}

template <class T>
void check_against_plain(const Weights& w, const Layer<T>& x) {
  w.write();
  const auto out = scored(w.path, x);
  double largest = 0;
  for (index_t h = 0; h < 3; ++h)
    for (index_t t = 0; t < x.tokens[h]; ++t) largest = std::max(largest, std::abs(plain_score(w, x, h, t)));
  for (index_t h = 0; h < 3; ++h)
    for (index_t t = 0; t < x.tokens[0]; ++t) {
      const auto got = static_cast<double>(out[static_cast<std::size_t>(h * x.tokens[0] + t)]);
      if (t >= x.tokens[h]) CHECK(got == -77);  // columns past a head's rows are left alone
      else CHECK(std::abs(got - plain_score(w, x, h, t)) <= 1e-5 * largest);
    }
  CHECK(scored(w.path, x, 3) == out);
}

GrantedBudget granted(double retain, std::span<const index_t> tokens) {
  Audit audit;
  return Budget::retain(retain).resolve(tokens, 1, 0, audit);
}

std::vector<index_t> allocated(const allocate::LkvH& part, const CacheShape& shape, std::span<const index_t> tokens,
                               const GrantedBudget& budget, Audit& audit) {
  std::vector<index_t> out(tokens.size());
  part.allocate(shape, tokens, budget, {out.data(), shape.layers, shape.kv_heads, shape.kv_heads}, audit);
  return out;
}

}  // namespace

TEST_CASE("a written checkpoint reads back, in float32 and float16") {
  const Weights w({KeyFrame::pre_rope, TokenFeatures::distance});
  for (const bool half : {false, true}) {
    w.write(half);
    const LkvCheckpoint c(w.path);
    CHECK(c.sizes() == w.sizes);
    CHECK(c.metadata().at("recipe") == "steps=3");
    CHECK(c.metadata().at("key_frame") == "pre-rope");
    CHECK(c.token_net(1, 2).inputs == 16);
    for (std::size_t i = 0; i < w.token_w1.size(); ++i)
      CHECK(std::abs(c.tensors().token_w1[i] - w.token_w1[i]) <= (half ? 1e-3f : 0.f));
    CHECK(*c.token_net(1, 2).w2 == c.tensors().token_w2[5 * 20]);
  }
}

TEST_CASE("a checkpoint that is not what it says is refused by field") {
  const Weights w;
  const auto refused = [&](const std::string& part, auto&& change) {
    w.write();
    const Safetensors file(w.path);
    SafetensorsWriter out;
    std::map<std::string, std::string> metadata = file.metadata();
    std::map<std::string, TensorView> tensors(file.tensors().begin(), file.tensors().end());
    change(metadata, tensors);
    for (const auto& [k, v] : metadata) out.metadata(k, v);
    for (const auto& [k, t] : tensors) out.add(k, t.dtype, t.shape, t.bytes);
    const std::string other = w.path + "-changed";
    out.write(other);
    std::string message;
    try {
      const LkvCheckpoint c(other);
    } catch (const format_error& e) {
      message = e.what();
    }
    std::filesystem::remove(other);
    CHECK_MESSAGE(message.find(part) != std::string::npos, part, " in: ", message);
  };
  refused("'format': 'kvevict-dump'", [](auto& m, auto&) { m["format"] = "kvevict-dump"; });
  refused("'version': '2'", [](auto& m, auto&) { m["version"] = "2"; });
  refused("'head_dim': is missing", [](auto& m, auto&) { m.erase("head_dim"); });
  refused("'n_layers': '0'", [](auto& m, auto&) { m["n_layers"] = "0"; });
  refused("'key_frame': 'sideways'; one of post-rope, pre-rope", [](auto& m, auto&) { m["key_frame"] = "sideways"; });
  refused("'activation': 'relu'", [](auto& m, auto&) { m["activation"] = "relu"; });
  refused("cannot hold a key of 14", [](auto& m, auto&) { m["head_dim"] = "14"; });
  refused("does not fit the other tensors", [](auto& m, auto&) { m["n_layers"] = "3"; });
  refused("'lkv_t.b1' is missing", [](auto&, auto& t) { t.erase("lkv_t.b1"); });
  refused("does not fit the other tensors", [](auto&, auto& t) { t["lkv_h.length"] = t.at("lkv_h.b1"); });
  refused("'extra' is unknown", [](auto&, auto& t) { t["extra"] = t.at("lkv_h.b1"); });
  refused("dtype I32", [](auto&, auto& t) { t.at("lkv_h.b1").dtype = DType::i32; });
}

TEST_CASE("weights that are not finite are refused by tensor") {
  for (const bool half : {false, true}) {
    Weights w;
    w.token_b1[3] = std::numeric_limits<float>::quiet_NaN();
    w.write(half);
    CHECK_THROWS_WITH_AS(LkvCheckpoint{w.path}, doctest::Contains("'lkv_t.b1': value 3 is nan"), format_error);
  }
}

TEST_CASE("parts say what is missing, and refuse a cache of another model") {
  const Weights w;
  w.write();
  Audit audit;
  std::vector<index_t> tokens(6, 10);
  CHECK_THROWS_WITH_AS(allocated(allocate::LkvH{}, w.shape(), tokens, granted(0.5, tokens), audit),
                       doctest::Contains("no weights"), std::invalid_argument);
  CacheShape other = w.shape();
  other.head_dim_v = 8;
  CHECK_THROWS_WITH_AS(allocated(allocate::LkvH{LkvFile(w.path)}, other, tokens, granted(0.5, tokens), audit),
                       doctest::Contains("2 layers x 3 KV heads with keys of 8 and values of 6"),
                       std::invalid_argument);
  CHECK_THROWS_AS(
      allocated(allocate::LkvH{LkvFile(w.path + "-absent")}, w.shape(), tokens, granted(0.5, tokens), audit),
      std::exception);
}

TEST_CASE("a file name prints quoted and reads back; copies share what was read") {
  const Weights w;
  w.write();
  score::LkvT part;
  CHECK(specification(part) == "lkv-t(file=\"\")");
  CHECK(parse_value('"' + w.path + '"', part.file));
  CHECK(specification(part) == "lkv-t(file=\"" + w.path + "\")");
  const allocate::LkvH head{part.file, true};
  CHECK(specification(head) == "lkv-h(file=\"" + w.path + "\",exact=true)");
  CHECK(&head.file.checkpoint("test") == &part.file.checkpoint("test"));
}

TEST_CASE("T5: floors stay within the budget, exact=true uses it up, empty heads are legal") {
  Weights w;
  for (auto& v : w.embedding) v *= 4;  // far apart ratios
  w.write();
  for (const index_t t : {1, 3, 64, 513})
    for (const double retain : {0.01, 0.15, 0.29, 0.5, 0.9, 1.0}) {
      const std::vector<index_t> tokens(6, t);
      const GrantedBudget budget = granted(retain, tokens);
      Audit audit;
      const auto floors = allocated(allocate::LkvH{LkvFile(w.path)}, w.shape(), tokens, budget, audit);
      const auto exact = allocated(allocate::LkvH{LkvFile(w.path), true}, w.shape(), tokens, budget, audit);
      CHECK(std::accumulate(floors.begin(), floors.end(), 0) <= budget.total);
      CHECK(std::accumulate(exact.begin(), exact.end(), 0) == budget.total);
      for (std::size_t i = 0; i < 6; ++i) {
        CHECK(floors[i] <= exact[i]);
        CHECK(exact[i] <= t);
      }
      if (t == 64 && retain == 0.01) CHECK(*std::min_element(floors.begin(), floors.end()) == 0);
      CHECK(audit.entries().empty());
    }
}

TEST_CASE("with slopes over the length, ratios change with it and the budget still holds") {
  Weights w;
  w.sizes.head_length = true;
  w.head_length = {2, 0, 0, 0, 0, -2};
  w.write();
  CHECK(LkvCheckpoint(w.path).sizes() == w.sizes);
  const auto rows = [&](index_t t) {
    const std::vector<index_t> tokens(6, t);
    Audit audit;
    return allocated(allocate::LkvH{LkvFile(w.path), true}, w.shape(), tokens, granted(0.3, tokens), audit);
  };
  const auto usual = rows(512), longer = rows(2048);
  CHECK(std::accumulate(longer.begin(), longer.end(), 0) == 3686);  // floor(0.3 * 6 * 2048)
  CHECK(longer[0] > 4 * usual[0] + 4);
  CHECK(longer[5] < 4 * usual[5] - 4);
  w.sizes.head_length = false;
  w.write();
  CHECK(LkvCheckpoint(w.path).tensors().head_length.empty());
  CHECK(rows(512) == usual);
}

TEST_CASE("left-over rows go to the largest fractions, then to the lower head") {
  Audit audit;
  const std::vector<double> ratios{0.25, 0.35, 0.25, 0.15};
  const std::vector<index_t> tokens(4, 10);
  // 2.5, 3.5, 2.5, 1.5 rows: floors 2, 3, 2, 1; two rows are left for four equal fractions.
  GrantedBudget budget;
  budget.total = 10;
  budget.full = 40;
  CHECK(allocate::LkvH::lkv_rows(ratios, tokens, budget, false, audit) == std::vector<std::int64_t>{2, 3, 2, 1});
  CHECK(allocate::LkvH::lkv_rows(ratios, tokens, budget, true, audit) == std::vector<std::int64_t>{3, 4, 2, 1});
  CHECK(audit.entries().empty());
  // Heads of unequal lengths: 9 rows asked of 8, so ratios are scaled, and the audit says so.
  const std::vector<index_t> lengths{4, 20, 4, 4};
  budget.total = 8;
  budget.full = 32;
  const auto rows = allocate::LkvH::lkv_rows(ratios, lengths, budget, false, audit);
  CHECK(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) == 8);
  CHECK(audit.entries().size() == 1);
}

TEST_CASE("token scores agree with a plain network in double for every element type and input form") {
  const Weights plain;
  check_against_plain(plain, Layer<float>(plain.shape()));
  check_against_plain(plain, Layer<fp16_t>(plain.shape()));
  check_against_plain(plain, Layer<bf16_t>(plain.shape()));
  const Weights pre({KeyFrame::pre_rope, TokenFeatures::none});
  Layer<float> turned(pre.shape());
  check_against_plain(pre, turned);
  turned.observed.rope.style = RopeStyle::interleaved;
  turned.observed.rope.attention_factor = 1.3f;
  check_against_plain(pre, turned);
  const Weights both({KeyFrame::pre_rope, TokenFeatures::distance});
  check_against_plain(both, Layer<bf16_t>(both.shape()));
}

TEST_CASE("token scores hold for hidden layers of any width and many tokens") {
  for (const index_t hidden : {1, 16, 33, 64, 80, 130}) {
    const Weights w({}, 2, hidden);
    check_against_plain(w, Layer<float>(w.shape(), hidden == 64 ? 3500 : 19));
  }
}

TEST_CASE("key frame and features each change the scores; keys before RoPE need its description") {
  std::vector<std::vector<float>> seen;
  for (const auto frame : {KeyFrame::post_rope, KeyFrame::pre_rope}) {
    const Weights w({frame, TokenFeatures::none});
    w.write();
    seen.push_back(scored(w.path, Layer<float>(w.shape())));
  }
  CHECK(seen[0] != seen[1]);
  const Weights w({KeyFrame::pre_rope, TokenFeatures::none});
  w.write();
  Layer<float> x(w.shape());
  x.observed.rope.inv_freq = {};
  CHECK_THROWS_WITH_AS(scored(w.path, x), doctest::Contains("RoPE"), std::invalid_argument);
  CHECK(distance_features(0)[0] == -2.f);
  CHECK(distance_features(0)[1] == 3.f);
  CHECK(distance_features(16)[1] == doctest::Approx(3 * std::exp(-1.0)));
}
