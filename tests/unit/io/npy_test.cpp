#include <doctest/doctest.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/raw_safetensors.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/interop/xtensor.hpp"
#include "kvevict/io/npy.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {
std::string npy(std::string_view header, std::string_view data, char version = 1) {
  std::string out = "\x93NUMPY";
  out += version;
  out += '\0';
  const std::size_t bytes = version == 1 ? 2 : 4;
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return out.append(header).append(data);
}
std::string floats(std::vector<float> x) { return {reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float)}; }

std::string refusal(std::string_view bytes) {
  TempDir dir;
  write_bytes(dir / "x.npy", bytes);
  const auto message = message_of<format_error>([&] { read_npy(dir / "x.npy"); });
  CHECK(has(message, (dir / "x.npy").string()));
  return message;
}
}  // namespace

TEST_CASE("f4 and f8 arrays are read as float and as double, in both orders") {
  TempDir dir;
  write_npy(dir / "f8.npy", xt::xarray<double>{{1.5, 2., 3.}, {4., 5., 0.1}});
  write_npy(dir / "f4.npy", xt::xarray<float>{{{1.f, 2.f}}});
  const auto a = read_npy<float>(dir / "f8.npy");
  CHECK(a.shape()[0] == 2);
  CHECK(a.shape()[1] == 3);
  CHECK(a(0, 0) == 1.5f);
  CHECK(a(1, 2) == 0.1f);
  CHECK(read_npy<double>(dir / "f8.npy")(1, 2) == 0.1);
  CHECK(read_npy<double>(dir / "f4.npy")(0, 0, 1) == 2.);

  write_bytes(dir / "fortran.npy",
              npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", floats({1, 4, 2, 5, 3, 6})));
  const auto f = read_npy(dir / "fortran.npy");
  CHECK(f(0, 1) == 2);
  CHECK(f(1, 0) == 4);
  CHECK(rows_of(f).at(1, 2) == 6);
}

TEST_CASE("headers of any length, version and order of keys are read") {
  TempDir dir;
  const std::string plain = "{'shape': (2,), 'descr': \"<f4\", 'fortran_order': False}";
  for (const char version : {'\1', '\2', '\3'})
    for (std::size_t padding : {std::size_t{0}, std::size_t{100}, std::size_t{200}, std::size_t{5000}}) {
      write_bytes(dir / "x.npy", npy(plain + std::string(padding, ' ') + '\n', floats({7, 8}), version));
      const auto a = read_npy(dir / "x.npy");
      CHECK(a.dimension() == 1);
      CHECK(a(1) == 8);
    }
  write_bytes(dir / "scalar.npy", npy("{'shape': (), 'descr': '<f4', 'fortran_order': False}", floats({7})));
  CHECK(read_npy(dir / "scalar.npy")() == 7);
}

TEST_CASE("types that npy cannot carry are refused with what to do instead") {
  const auto descr = [](const char* d) {
    return refusal(npy(std::string("{'descr': ") + d + ", 'fortran_order': False, 'shape': (1,), }\n", "1234"));
  };
  CHECK(has(descr("'<f2'"), "half precision"));
  CHECK(has(descr("'<f2'"), "safetensors, which holds f16 and bf16"));
  CHECK(has(descr("'|V2'"), "bfloat16"));
  CHECK(has(descr("'bfloat16'"), "safetensors"));
  CHECK(has(descr("'>f4'"), "big endian; '<f4' is required"));
  CHECK(has(descr("'<i4'"), "descr: '<i4'; '<f4' or '<f8'"));
  CHECK(has(descr("[('a', '<f4')]"), "structured dtype"));
}

TEST_CASE("malformed npy files are refused by field") {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }\n";
  const std::string bytes = npy(good, floats({1, 2, 3, 4}));
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    CAPTURE(n);
    REQUIRE(has(refusal(bytes.substr(0, n)), "x.npy"));
  }
  CHECK(has(refusal(bytes + "1234"), "shape: needs 16 bytes of f4, but 20 follow"));
  CHECK(has(refusal("PK\x03\x04 a zip archive"), "is not an npy file"));
  CHECK(has(refusal(npy(good, floats({1, 2, 3, 4}), 4)), "version 4.0"));
  const auto header = [](std::string_view h) { return refusal(npy(h, floats({1, 2, 3, 4}))); };
  CHECK(has(header("{'descr': '<f4', 'shape': (4,)}"), "are required"));
  CHECK(has(header("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (4,)}"), "stands twice"));
  CHECK(has(header("{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}"), "fortran_order"));
  CHECK(has(header("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}"), "shape: a size from 0"));
  CHECK(has(header("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,)}"), "shape: a size"));
  CHECK(has(header("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"), "2^64 bytes"));
  CHECK(has(header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)} x"), "behind the closing brace"));
  CHECK(has(header("{'descr': '<f4', 'fortran_order': False, 'shape': 4}"), "'(' is missing"));
  CHECK(has(header("{'descr': '<f4' 'fortran_order': False}"), "',' is missing"));
  CHECK(has(header("{'descr"), "quoted text"));
  TempDir dir;
  CHECK(has(message_of<format_error>([&] { read_npy(dir.path()); }), "is a folder"));
}

TEST_CASE("layers recorded as npy files are a cache") {
  TempDir dir;
  xt::xarray<float> k = xt::xarray<float>::from_shape({2, 3, 2}), v = xt::xarray<float>::from_shape({2, 3, 1}),
                    q = xt::xarray<float>::from_shape({4, 2, 2});
  for (std::size_t i = 0; i < k.size(); ++i) k.flat(i) = static_cast<float>(i);
  for (std::size_t i = 0; i < v.size(); ++i) v.flat(i) = 100 + static_cast<float>(i);
  for (std::size_t i = 0; i < q.size(); ++i) q.flat(i) = 200 + static_cast<float>(i);
  write_npy(dir / "k.npy", k);
  write_npy(dir / "v.npy", v);
  write_npy(dir / "q.npy", q);
  const NpyLayer layer{dir / "k.npy", dir / "v.npy", dir / "q.npy"};
  const auto cache = read_npy_cache({layer, layer});
  CHECK(cache.shape() == CacheShape{2, 2, 4, 2, 1});
  CHECK(cache.tokens(1, 1) == 3);
  CHECK(cache.keys(1, 1).at(2, 0) == 10);
  CHECK(cache.values(0, 1).at(0, 0) == 103);
  CHECK(cache.positions(0, 0)[2] == 2);
  CHECK(cache.prompt_queries(0, 3).at(1, 1) == 215);
  CHECK(cache.prompt_query_positions()[0] == 1);
  CHECK(cache.continuation_len() == 0);

  const auto bare = read_npy_cache({{dir / "k.npy", dir / "v.npy", {}}});
  CHECK(bare.shape().q_heads == 2);
  CHECK(bare.prompt_queries(0, 0).rows == 0);

  const auto refused = [](const std::vector<NpyLayer>& layers) {
    return message_of<format_error>([&] { read_npy_cache(layers); });
  };
  CHECK(has(refused({{dir / "k.npy", dir / "q.npy", {}}}), "4 heads of 2 tokens; the keys have 2 of 3"));
  CHECK(has(refused({layer, {dir / "q.npy", dir / "v.npy", dir / "q.npy"}}), "the same in every layer"));
  CHECK(has(refused({{dir / "k.npy", dir / "v.npy", dir / "v.npy"}}), "does not fit keys"));
  CHECK_THROWS_AS(read_npy_cache({}), std::invalid_argument);
  CHECK_THROWS_AS(read_npy_cache({layer, {dir / "k.npy", dir / "v.npy", {}}}), std::invalid_argument);
}
