#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/raw_safetensors.hpp"
#include "common/synthetic_dump.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/dump.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {

template <class T>
bool equal_rows(Rows<const T> rows, const T* want) {
  for (std::int64_t r = 0; r < rows.rows; ++r)
    for (index_t c = 0; c < rows.cols; ++c)
      if (!(rows.at(r, c) == want[r * rows.cols + c])) return false;
  return true;
}

// Touches every element that a dump shows, for the sanitizers.
float sum_of_everything(const std::filesystem::path& path) {
  return visit_dump(path, [](const auto& dump) {
    float sum = 0;
    const auto add = [&](const auto& rows) {
      for (std::int64_t r = 0; r < rows.rows; ++r)
        for (index_t c = 0; c < rows.cols; ++c) sum += to_float(rows.at(r, c));
    };
    const auto& cache = dump.cache();
    for (index_t l = 0; l < cache.shape().layers; ++l) {
      const auto layer = observe_layer(dump, l);
      for (const auto* list : {&layer.keys, &layer.values, &layer.window_queries, &layer.future_queries})
        for (const auto& rows : *list) add(rows);
      for (const auto* list : {&layer.attn_sum, &layer.q_mean, &layer.q_cov})
        for (const auto& rows : *list) add(rows);
      add(layer.o_proj);
      for (index_t h = 0; h < cache.shape().kv_heads; ++h) {
        add(cache.continuation_keys(l, h));
        add(cache.continuation_values(l, h));
      }
    }
    for (const auto p : dump.info().q_positions) sum += static_cast<float>(p);
    return sum;
  });
}

// A valid dump that a test breaks in one place.
struct Broken : RawSafetensors {
  explicit Broken(const TempDir& folder) : RawSafetensors(valid()), dir(folder) {}
  static const RawSafetensors& valid() {
    static const RawSafetensors made = [] {  // once: a written file waits for the disk
      TempDir folder;
      SyntheticDump().write<float>(folder / "dump");
      return RawSafetensors(folder / "dump");
    }();
    return made;
  }
  std::string refusal() const {
    save(dir / "broken");
    const auto message = message_of<format_error>([&] { sum_of_everything(dir / "broken"); });
    CHECK(has(message, (dir / "broken").string()));
    return message;
  }
  const TempDir& dir;
};

template <class F>
std::string refusal(F&& damage) {
  TempDir dir;
  Broken file(dir);
  damage(file);
  return file.refusal();
}
std::string refusal_of_metadata(const char* key, const char* value) {
  return refusal([&](Broken& f) { f.metadata()[key] = value; });
}

}  // namespace

TEST_CASE_TEMPLATE("a dump shows what was recorded", T, float, fp16_t, bf16_t) {
  TempDir dir;
  SyntheticDump made;
  made.first_position = 100;
  made.write<T>(dir / "dump");
  const auto want = made.layers<T>();
  const std::size_t total = 28, prompt = 24, d = 8, queries = 10, window = 6;

  visit_dump(dir / "dump", [&](const auto& dump) {
    using E = typename std::remove_cvref_t<decltype(dump.cache())>::element_type;
    REQUIRE(std::is_same_v<E, T>);
    if constexpr (std::is_same_v<E, T>) {
      const RecordedCache<T>& cache = dump.cache();
      CHECK(cache.shape() == CacheShape{2, 2, 4, 8, 8});
      CHECK(cache.tokens(1, 1) == 24);
      CHECK(cache.continuation_len() == 4);
      CHECK(dump.info().token_ids[3] == 21);
      for (index_t l = 0; l < 2; ++l) {
        const auto& layer = want[static_cast<std::size_t>(l)];
        for (index_t h = 0; h < 2; ++h) {
          const std::size_t first = static_cast<std::size_t>(h) * total * d;
          CHECK(cache.keys(l, h).rows == 24);
          CHECK(equal_rows(cache.keys(l, h), layer.k.data() + first));
          CHECK(equal_rows(cache.values(l, h), layer.v.data() + first));
          CHECK(equal_rows(cache.continuation_keys(l, h), layer.k.data() + first + prompt * d));
          CHECK(equal_rows(cache.continuation_values(l, h), layer.v.data() + first + prompt * d));
          CHECK(cache.positions(l, h).front() == 100);
          CHECK(cache.positions(l, h).back() == 123);
        }
        for (index_t h = 0; h < 4; ++h) {
          const std::size_t first = static_cast<std::size_t>(h) * queries * d;
          CHECK(equal_rows(cache.prompt_queries(l, h), layer.q.data() + first));
          CHECK(equal_rows(cache.continuation_queries(l, h), layer.q.data() + first + window * d));
          CHECK(cache.continuation_queries(l, h).rows == 4);
        }
      }
      CHECK(cache.prompt_query_positions().front() == 118);
      CHECK(cache.continuation_positions().front() == 124);
    }
  });
}

TEST_CASE("a recording that is read instead of mapped does not notice what becomes of its file") {
  TempDir dir;
  const SyntheticDump made;
  made.write<float>(dir / "dump");
  const Dump<float> dump(dir / "dump", ReadMode::copy);
  const Dump<float> mapped(dir / "dump");
  for (index_t l = 0; l < dump.info().shape.layers; ++l)
    for (index_t h = 0; h < dump.info().shape.kv_heads; ++h)
      for (index_t t = 0; t < dump.cache().tokens(l, h); ++t)
        CHECK(dump.cache().keys(l, h).at(t, 0) == mapped.cache().keys(l, h).at(t, 0));
  std::filesystem::resize_file(dir / "dump", 100);
  float sum = 0;
  for (index_t t = 0; t < dump.cache().tokens(0, 0); ++t) sum += dump.cache().keys(0, 0).at(t, 0);
  CHECK(std::isfinite(sum));
  CHECK_THROWS_AS(Dump<float>(dir / "dump", ReadMode::copy), format_error);  // truncated by now
}

TEST_CASE("an observation holds all that the file holds and lives on its own") {
  TempDir dir;
  const SyntheticDump made;
  made.write<fp16_t>(dir / "dump");
  const auto want = made.layers<fp16_t>()[1];
  OwnedObservation<fp16_t> layer;
  {
    const Dump<fp16_t> dump(dir / "dump");
    layer = observe_layer(dump, 1);
    CHECK(has(message_of<std::invalid_argument>([&] { (void)observe_layer(dump, 2); }), "layer 2; 0 to 1"));
  }
  const auto o = layer.observation();
  CHECK(o.layer == 1);
  CHECK(o.softmax_scale == 1.f / std::sqrt(8.f));
  CHECK(o.rope.style == RopeStyle::half);
  CHECK(o.rope.rotary_dim == 8);
  CHECK(o.rope.inv_freq[0] == 1.f);
  CHECK(o.rope.inv_freq[1] == doctest::Approx(0.1));  // 10000^(-2/8)
  CHECK(o.window_queries.size() == 4);
  CHECK(o.window_queries[3].rows == 6);
  CHECK(o.window_positions.back() == 23);
  CHECK(o.extras.future_queries[0].rows == 4);
  CHECK(equal_rows(o.extras.attn_sum[0], want.attn_sum.data()));
  CHECK(o.extras.attn_sum[0].rows == 4);
  CHECK(o.extras.attn_sum[0].cols == 24);
  CHECK(equal_rows(o.extras.q_mean[0], want.q_mean.data()));
  CHECK(o.extras.q_cov.size() == 4);
  CHECK(equal_rows(o.extras.q_cov[3], want.q_cov.data() + 3 * 64));
  CHECK(o.extras.o_proj.rows == 16);
  CHECK(o.extras.o_proj.cols == 32);
  CHECK(equal_rows(o.extras.o_proj, want.o_proj.data()));
  CHECK(equal_rows(o.keys[1], want.k.data() + 28 * 8));
}

TEST_CASE("optional tensors of another float type are converted") {
  TempDir dir;
  Broken file(dir);  // k, v, q and o_proj are f32
  file.remove("layers.0.o_proj");
  file.remove("layers.0.q_mean");
  file.append("layers.0.o_proj", "F16", {16, 32}, 16 * 32 * 2);
  file.append("layers.0.q_mean", "BF16", {4, 8}, 4 * 8 * 2);
  file.elements<std::uint16_t>("layers.0.o_proj")[33] = 0x3c00;  // 1 in f16
  file.elements<std::uint16_t>("layers.0.q_mean")[8] = 0xc000;   // -2 in bf16
  file.save(dir / "mixed");
  const auto layer = observe_layer(Dump<float>(dir / "mixed"), 0);
  CHECK(layer.o_proj.at(1, 1) == 1.f);
  CHECK(layer.q_mean[0].at(1, 0) == -2.f);
}

TEST_CASE("extras, continuation and prompt queries may be absent") {
  TempDir dir;
  SyntheticDump made;
  made.extras = false;
  made.continuation_len = 0;
  made.write<float>(dir / "prompt only");
  auto layer = observe_layer(Dump<float>(dir / "prompt only"), 0);
  CHECK(layer.attn_sum.empty());
  CHECK(layer.q_cov.empty());
  CHECK(layer.o_proj.data == nullptr);
  CHECK(layer.future_queries.empty());
  CHECK(layer.window_queries[0].rows == 6);

  made.continuation_len = 4;
  made.prompt_queries = 0;
  made.write<float>(dir / "no window");
  layer = observe_layer(Dump<float>(dir / "no window"), 0);
  CHECK(layer.window_queries.empty());
  CHECK(layer.window_positions.empty());
  CHECK(layer.future_queries[0].rows == 4);
}

TEST_CASE("frequencies of their own replace theta") {
  TempDir dir;
  const SyntheticDump made;
  auto info = made.info();
  info.rope_theta = 0;
  info.rope_inv_freq = {1.f, 0.25f, 0.f};  // 6 of 8 elements turn
  info.rope_attention_factor = 1.5f;
  info.rope_style = RopeStyle::interleaved;
  info.layers = {3, 7};
  info.q_stats_first = 4;
  write_dump(dir / "dump", info, made.layers<float>());
  const Dump<float> dump(dir / "dump");
  const Rope rope = dump.info().rope();
  CHECK(rope.rotary_dim == 6);
  CHECK(rope.inv_freq[1] == 0.25f);
  CHECK(rope.attention_factor == 1.5f);
  CHECK(rope.style == RopeStyle::interleaved);
  CHECK(dump.info().layers == std::vector<index_t>{3, 7});
  CHECK(observe_layer(dump, 0).q_stats_first == 4);
}

TEST_CASE("a dump of another element type is refused where one is asked for") {
  TempDir dir;
  SyntheticDump().write<bf16_t>(dir / "dump");
  CHECK(has(message_of<format_error>([&] { Dump<float> d(dir / "dump"); }), "layers.0.k': dtype is BF16; F32"));
}

TEST_CASE("the embedded recording is what its metadata says") {
  const Dump<fp16_t> dump(std::filesystem::path(KVEVICT_SOURCE_DIR) / "examples/data/smollm2-512.safetensors");
  CHECK(dump.cache().shape() == CacheShape{30, 3, 9, 64, 64});
  CHECK(dump.cache().prompt_len() == 512);
  CHECK(dump.cache().continuation_len() == 64);
  CHECK(dump.cache().prompt_query_positions().size() == 64);
  const auto layer = observe_layer(dump, 29);
  CHECK(layer.q_stats_first == 4);
  // Each of the 512 rows spends an attention of 1, so that the columns sum to 512.
  double sum = 0;
  for (index_t c = 0; c < 512; ++c) sum += layer.attn_sum[0].at(0, c);
  CHECK(sum == doctest::Approx(512).epsilon(1e-4));
}

TEST_CASE("broken dumps: truncated anywhere in the header or the data") {
  TempDir dir;
  SyntheticDump small;
  small.shape = {1, 1, 1, 4, 4};
  small.prompt_len = 6;
  small.prompt_queries = 2;
  small.write<fp16_t>(dir / "dump");
  const std::string bytes = read_bytes(dir / "dump");
  const std::size_t header = bytes.size() - RawSafetensors(dir / "dump").data.size();
  const auto refused = [&](std::size_t length) {
    write_bytes(dir / "cut", std::string_view(bytes).substr(0, length));
    const auto message = message_of<format_error>([&] { sum_of_everything(dir / "cut"); });
    return has(message, (dir / "cut").string()) && (has(message, "header") || has(message, "tensor '"));
  };
  for (std::size_t n = 0; n < header; ++n) {
    CAPTURE(n);
    REQUIRE(refused(n));
  }
  for (std::size_t i = 0; i < 50; ++i) {
    const std::size_t n = header + i * (bytes.size() - header) / 50;
    CAPTURE(n);
    REQUIRE(refused(n));
  }
  CHECK_NOTHROW(sum_of_everything(dir / "dump"));
}

TEST_CASE("broken dumps: any damage is refused or harmless") {
  TempDir dir;
  SyntheticDump small;
  small.shape = {1, 1, 2, 4, 4};
  small.write<float>(dir / "dump");
  const std::string bytes = read_bytes(dir / "dump");
  const std::size_t header = bytes.size() - RawSafetensors(dir / "dump").data.size();
  int refused = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    std::string damaged = bytes;
    for (std::uint64_t k = 0; k <= i % 3; ++k) {
      const auto place = static_cast<std::size_t>((small.value(i, 2 * k) + 1) / 2 * static_cast<float>(header));
      constexpr std::string_view likely = "0123456789[]{},:\"-e. \x80k";
      const auto letter = static_cast<std::size_t>((small.value(i, 2 * k + 1) + 1) / 2 * likely.size());
      damaged[std::min(place, header - 1)] = likely[std::min(letter, likely.size() - 1)];
    }
    write_bytes(dir / "damaged", damaged);
    try {
      sum_of_everything(dir / "damaged");
    } catch (const format_error&) {
      ++refused;  // any other exception fails the test
    }
  }
  CHECK(refused > 1000);
}

TEST_CASE("broken dumps: tensors that are missing, unknown or of a layer that does not exist") {
  for (const char* name : {"layers.1.k", "layers.0.v", "layers.1.q", "positions", "q_positions", "token_ids"})
    CHECK(has(refusal([&](Broken& f) { f.remove(name); }), std::string("tensor '") + name + "' is missing"));
  for (const char* name : {"extra", "layers.0.kk", "layers.00.k", "layers.+0.k", "layers.0", "layers.-1.k", "layers..k",
                           "layers.99999999999.k", "layers.0.k.", "Layers.0.k"})
    CHECK(has(refusal([&](Broken& f) {
                f.append(name, "F32", {2, 28, 8}, 2 * 28 * 8 * 4);
              }),
              std::string("tensor '") + name + "': is unknown"));
  CHECK(has(refusal([](Broken& f) {
              f.append("layers.2.k", "F32", {2, 28, 8}, 2 * 28 * 8 * 4);
            }),
            "tensor 'layers.2.k': layer 2 does not exist; n_layers is 2"));
  CHECK(has(refusal_of_metadata("n_layers", "1"), "layer 1 does not exist; n_layers is 1"));
  CHECK(has(refusal_of_metadata("n_layers", "2147483647"), "tensor 'layers.2.k' is missing"));
}

TEST_CASE("broken dumps: wrong dtype and wrong shape") {
  const auto retyped = [](const char* name, const char* dtype, std::vector<std::int64_t> shape) {
    return refusal([&](Broken& f) {
      f.header[name]["dtype"] = dtype;
      f.header[name]["shape"] = shape;
    });
  };
  CHECK(has(retyped("layers.1.v", "I32", {2, 28, 8}), "tensor 'layers.1.v': dtype is I32; F32 is required, as in"));
  CHECK(has(retyped("layers.0.k", "I32", {2, 28, 8}), "tensor 'layers.0.k': dtype is I32; F32, F16 or BF16"));
  CHECK(has(retyped("layers.0.q_mean", "I32", {4, 8}), "tensor 'layers.0.q_mean': dtype is I32"));
  CHECK(has(retyped("positions", "F32", {28}), "tensor 'positions': dtype is F32; I32 is required"));
  CHECK(has(retyped("token_ids", "U32", {28}), "tensor 'token_ids': dtype is U32; I32 is required"));
  CHECK(has(retyped("layers.1.k", "F32", {28, 2, 8}), "tensor 'layers.1.k': shape is [28, 2, 8]; [2, 28, 8]"));
  CHECK(has(retyped("layers.0.k", "F32", {2, 28, 4, 2}), "tensor 'layers.0.k': shape is [2, 28, 4, 2]"));
  CHECK(has(retyped("layers.0.q", "F32", {4, 8, 10}), "tensor 'layers.0.q': shape is [4, 8, 10]; [4, 10, 8]"));
  CHECK(has(retyped("layers.0.o_proj", "F32", {32, 16}), "tensor 'layers.0.o_proj': shape is [32, 16]; [any, 32]"));
  CHECK(has(retyped("layers.0.attn_sum", "F32", {24, 4}), "tensor 'layers.0.attn_sum': shape is [24, 4]; [4, 24]"));
  CHECK(has(retyped("layers.0.q_cov", "F32", {4, 64}), "tensor 'layers.0.q_cov': shape is [4, 64]; [4, 8, 8]"));
  CHECK(has(retyped("positions", "I32", {4, 7}), "tensor 'positions': shape is [4, 7]; [any]"));
  CHECK(has(refusal_of_metadata("head_dim", "16"), "tensor 'layers.0.k': shape is [2, 28, 8]; [2, any, 16]"));
  CHECK(has(refusal_of_metadata("n_kv_heads", "4"), "[4, any, 8] is required"));
  CHECK(has(refusal_of_metadata("n_q_heads", "2"), "tensor 'layers.0.q': shape is [4, 10, 8]; [2, 10, 8]"));
  CHECK(has(refusal_of_metadata("prompt_len", "23"), "tensor 'layers.0.attn_sum': shape is [4, 24]; [4, 23]"));
}

TEST_CASE("broken dumps: metadata") {
  for (const char* key : {"format", "version", "model", "n_layers", "n_kv_heads", "n_q_heads", "head_dim", "prompt_len",
                          "softmax_scale", "rope_theta"})
    CHECK(has(refusal([&](Broken& f) { f.metadata().erase(key); }), std::string("metadata '") + key + "': is missing"));
  CHECK(has(refusal_of_metadata("format", "kvevict-plan"), "metadata 'format': 'kvevict-plan'; 'kvevict-dump'"));
  CHECK(has(refusal_of_metadata("version", "2"), "metadata 'version': '2'; this reader knows version 1"));
  for (const char* number : {"0", "-1", "x", "", "2 ", " 2", "2.0", "0x2", "2147483648", "99999999999999999999"})
    CHECK(has(refusal_of_metadata("n_layers", number), "metadata 'n_layers': '"));
  for (const char* number : {"0", "-0.1", "nan", "inf", "", "1e-60", "1e60", "1e999", "0,3"})
    CHECK(has(refusal_of_metadata("softmax_scale", number), "metadata 'softmax_scale': '"));
  CHECK(has(refusal_of_metadata("rope_theta", "0"), "metadata 'rope_theta'"));
  CHECK(has(refusal_of_metadata("n_q_heads", "3"), "n_q_heads: 3 query heads do not divide evenly over 2"));
  CHECK(has(refusal_of_metadata("prompt_len", "29"), "prompt_len: 29; 1 to 28"));
  CHECK(has(refusal_of_metadata("prompt_len", "17"), "q_positions: 10 entries; every continuation row (11)"));
  CHECK(has(refusal_of_metadata("layers", "0,1,2"), "layers: 3 numbers; n_layers is 2"));
  CHECK(has(refusal_of_metadata("layers", "0,"), "metadata 'layers': '' is not"));
  CHECK(has(refusal_of_metadata("q_stats_first", "24"), "q_stats_first: 24; below prompt_len, 24"));
  CHECK(has(refusal_of_metadata("rope_attention_factor", "-1"), "metadata 'rope_attention_factor'"));
}

TEST_CASE("U51: a dump that does not say how its keys were rotated is refused") {
  CHECK(has(refusal([](Broken& f) { f.metadata().erase("rope_style"); }),
            "metadata 'rope_style': is missing; one of half, interleaved"));
  for (const char* key : {"attn_logit_softcapping", "sliding_window", "created_by"})
    CHECK(has(refusal_of_metadata(key, "16"), std::string("metadata '") + key + "': is unknown"));
  CHECK(has(refusal_of_metadata("rope_style", "neox"), "metadata 'rope_style': 'neox'; one of half, interleaved"));
}

TEST_CASE("broken dumps: positions") {
  const auto changed = [](const char* name, std::size_t i, index_t value) {
    return refusal([&](Broken& f) { f.elements<index_t>(name)[i] = value; });
  };
  CHECK(has(changed("positions", 5, 4), "tensor 'positions': entry 5 is 4"));
  CHECK(has(changed("positions", 0, -1), "tensor 'positions': entry 0 is -1"));
  CHECK(has(changed("q_positions", 9, 26), "tensor 'q_positions': entry 9 is 26"));
  CHECK(has(changed("q_positions", 9, 28), "q_positions: entry 9 is 28; 27 is required"));
  CHECK(has(changed("q_positions", 0, 17), "q_positions: entry 0 is 17; 18 is required"));
  CHECK(has(refusal([](Broken& f) {
              f.remove("q_positions");
              f.append("q_positions", "I32", {0}, 0);
            }),
            "q_positions: 0 entries"));
  CHECK(has(refusal([](Broken& f) { f.append("rope_inv_freq", "F32", {5}, 20); }), "rope_inv_freq: 5 entries"));
  CHECK(has(refusal([](Broken& f) { f.append("rope_inv_freq", "F16", {4}, 8); }), "'rope_inv_freq': dtype is F16"));
}

TEST_CASE("the writer refuses layers that do not fit and leaves no file behind") {
  TempDir dir;
  const SyntheticDump made;
  const auto refused = [&](auto change) {
    auto info = made.info();
    auto layers = made.layers<float>();
    change(info, layers);
    return message_of<std::invalid_argument>([&] { write_dump(dir / "dump", info, layers); });
  };
  CHECK(has(refused([](auto&, auto& layers) { layers.pop_back(); }), "1 layers; the shape has 2"));
  CHECK(has(refused([](auto&, auto& layers) { layers[1].v.pop_back(); }), "'layers.1.v': shape [2, 28, 8]"));
  CHECK(has(refused([](auto&, auto& layers) { layers[0].o_proj.pop_back(); }), "'layers.0.o_proj'"));
  CHECK(has(refused([](auto& info, auto&) { info.token_ids.pop_back(); }), "token_ids: 27 entries"));
  CHECK(has(refused([](auto& info, auto&) { info.q_positions.back() = 30; }), "q_positions: entry 9 is 30"));
  CHECK(has(refused([](auto& info, auto&) { info.positions[1] = 0; }), "entry 1 is 0"));
  CHECK(has(refused([](auto& info, auto&) { info.rope_theta = 0; }), "rope_theta 0"));
  CHECK(has(refused([](auto& info, auto&) { info.softmax_scale = 0; }), "softmax_scale 0"));
  CHECK(has(refused([](auto& info, auto&) { info.shape.head_dim_v = 4; }), "one head_dim"));
  CHECK(dir.files() == 0);
}
