#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/raw_safetensors.hpp"
#include "common/temp_dir.hpp"
#include "kvevict/io/safetensors.hpp"

using namespace kvevict;
using namespace kvevict::testing;

namespace {
// Opens `bytes` as a file and gives the message of its format_error, which has to name the file.
std::string refusal(const TempDir& dir, std::string_view bytes) {
  write_bytes(dir / "broken", bytes);
  const auto message = message_of<format_error>([&] { Safetensors file(dir / "broken"); });
  CHECK(has(message, (dir / "broken").string()));
  return message;
}
std::string refusal_of_header(const TempDir& dir, std::string_view header, std::size_t data_bytes = 0) {
  return refusal(dir, RawSafetensors::assemble(header, std::string(data_bytes, '\0')));
}
}  // namespace

TEST_CASE("what was written is read back, every type, with metadata") {
  TempDir dir;
  const std::vector<double> f64{1.5, -2.25};
  const std::vector<float> f32{0.5f, std::numeric_limits<float>::infinity(), -0.f};
  const std::vector<fp16_t> f16{{0x3c00}, {0x7c01}, {0x8000}};
  const std::vector<bf16_t> bf16{{0x3f80}};
  const std::vector<std::int64_t> i64{-5, std::int64_t{1} << 40};
  const std::vector<std::int32_t> i32{7, -7, 0, 1, 2, 3};
  const std::vector<std::uint8_t> u8{255, 0, 1};
  SafetensorsWriter writer;
  writer.metadata("author", "a \"quoted\" name, ä");
  writer.add<std::uint8_t>("u8", {3}, u8);
  writer.add<double>("f64", {2}, f64);
  writer.add<float>("f32", {3, 1}, f32);
  writer.add<fp16_t>("f16", {3}, f16);
  writer.add<bf16_t>("bf16", {}, bf16);
  writer.add<std::int64_t>("i64", {2, 1, 1}, i64);
  writer.add<std::int32_t>("i32", {2, 3}, i32);
  writer.add<float>("empty", {4, 0}, {});
  writer.write(dir / "all");

  Safetensors opened(dir / "all");
  const Safetensors file = std::move(opened);  // tensors stay valid where the file moves
  CHECK(file.metadata().at("author") == "a \"quoted\" name, ä");
  CHECK(file.tensors().size() == 8);
  CHECK(std::ranges::equal(file.at("f64").as<double>(), f64));
  CHECK(std::ranges::equal(file.at("f32").as<float>(), f32));
  CHECK(std::signbit(file.at("f32").as<float>()[2]));
  CHECK(std::ranges::equal(file.at("f16").as<fp16_t>(), f16));
  CHECK(std::ranges::equal(file.at("bf16").as<bf16_t>(), bf16));
  CHECK(std::ranges::equal(file.at("i64").as<std::int64_t>(), i64));
  CHECK(std::ranges::equal(file.at("i32").as<std::int32_t>(), i32));
  CHECK(std::ranges::equal(file.at("u8").as<std::uint8_t>(), u8));
  CHECK(file.at("i32").shape == std::vector<std::int64_t>{2, 3});
  CHECK(file.at("bf16").shape.empty());
  CHECK(file.at("empty").size() == 0);
  CHECK(file.contains("u8"));
  CHECK_FALSE(file.contains("u9"));

  // The data begins at a multiple of 8 and large elements come first, so that every tensor is aligned in the file.
  const RawSafetensors raw(dir / "all");
  CHECK((read_bytes(dir / "all").size() - raw.data.size()) % 8 == 0);
  CHECK(raw.header["f64"]["data_offsets"][0] == 0);
  CHECK(raw.header["u8"]["data_offsets"][1] == raw.data.size());
}

TEST_CASE("equal content gives equal bytes whatever the order of the calls") {
  TempDir dir;
  const std::vector<float> x{1.f, 2.f};
  SafetensorsWriter a, b;
  a.metadata("one", "1");
  a.metadata("two", "2");
  a.add<float>("x", {2}, x);
  a.add<float>("y", {1, 2}, x);
  b.add<float>("y", {1, 2}, x);
  b.add<float>("x", {2}, x);
  b.metadata("two", "2");
  b.metadata("one", "1");
  a.write(dir / "a");
  b.write(dir / "b");
  CHECK(read_bytes(dir / "a") == read_bytes(dir / "b"));
}

TEST_CASE("the writer refuses what no reader would take") {
  const std::vector<float> x{1.f, 2.f};
  TempDir dir;
  SafetensorsWriter writer;
  writer.add<float>("x", {2}, x);
  const auto add = [&](const char* name, std::vector<std::int64_t> shape) {
    return message_of<std::invalid_argument>([&] { writer.add<float>(name, shape, x); });
  };
  CHECK(has(add("x", {2}), "tensor 'x' was added before"));
  CHECK(has(add("y", {3}), "shape [3] of F32 does not fit 8 bytes"));
  CHECK(has(add("y", {-1, -2}), "does not fit"));
  CHECK(has(add("y", {std::int64_t{1} << 62, 16}), "does not fit"));
  CHECK(has(add("__metadata__", {2}), "cannot name a tensor"));
  writer.metadata("text", "\xff");
  CHECK(has(message_of<std::invalid_argument>([&] { writer.write(dir / "x"); }), "not UTF-8"));
  CHECK(dir.files() == 0);
}

TEST_CASE("a file is replaced whole or not at all") {
  TempDir dir;
  write_bytes(dir / "target", "old");
  {
    AtomicFile file(dir / "target");
    file.write("new and longer");
    CHECK(read_bytes(dir / "target") == "old");
  }  // no commit
  CHECK(read_bytes(dir / "target") == "old");
  CHECK(dir.files() == 1);
  {
    AtomicFile file(dir / "target");
    file.write("new and longer");
    file.commit();
  }
  CHECK(read_bytes(dir / "target") == "new and longer");
  CHECK(dir.files() == 1);

  std::filesystem::create_symlink(dir / "target", dir / "link");
  AtomicFile through(dir / "link");
  through.write("by the link");
  through.commit();
  CHECK(std::filesystem::is_symlink(dir / "link"));
  CHECK(read_bytes(dir / "target") == "by the link");

  CHECK_THROWS_AS(AtomicFile(dir.path()), std::system_error);
  CHECK(has(message_of<std::system_error>([&] { AtomicFile file(dir / "no/such/folder"); }), "no/such/folder"));
  CHECK(has(message_of<std::system_error>([] { AtomicFile file("/dev/null"); }), "not a regular file"));
}

TEST_CASE("another type than asked for is refused by name") {
  TempDir dir;
  const std::vector<float> x{1.f};
  SafetensorsWriter writer;
  writer.add<float>("x", {1}, x);
  writer.write(dir / "file");
  const Safetensors file(dir / "file");
  const auto wrong = message_of<format_error>([&] { (void)file.at("x").as<fp16_t>(); });
  CHECK(has(wrong, "tensor 'x': dtype is F32; F16 is required"));
  const auto missing = message_of<format_error>([&] { (void)file.at("y"); });
  CHECK(has(missing, (dir / "file").string() + ": tensor 'y' is missing"));
}

TEST_CASE("tensors at odd addresses are read all the same") {
  TempDir dir;
  // 3 bytes of u8, then an f32 of value 1 at byte 3.
  const std::string header = R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                             R"("b":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}})";
  write_bytes(dir / "odd", RawSafetensors::assemble(header, std::string("\1\2\3\0\0\x80\x3f", 7)));
  const Safetensors file(dir / "odd");
  CHECK(file.at("a").as<std::uint8_t>()[2] == 3);
  CHECK(file.at("b").as<float>()[0] == 1.f);
}

TEST_CASE("what is no file is refused") {
  TempDir dir;
  CHECK(has(message_of<format_error>([&] { Safetensors f(dir / "none"); }), "cannot be opened: No such file"));
  CHECK(has(message_of<format_error>([&] { Safetensors f(dir.path()); }), "is a folder"));
  CHECK(has(message_of<format_error>([] { Safetensors f("/dev/zero"); }), "is not a regular file"));
  CHECK(has(refusal(dir, ""), "header length: the file has 0 bytes"));
  CHECK(has(refusal(dir, "1234567"), "header length: the file has 7 bytes"));
}

TEST_CASE("a header length that does not fit is refused") {
  TempDir dir;
  const auto length = [&](std::uint64_t n) {
    std::string bytes = RawSafetensors::assemble("{}", "");
    std::memcpy(bytes.data(), &n, 8);
    return refusal(dir, bytes);
  };
  CHECK(has(length(3), "header length: 3 bytes, but only 2 follow"));
  CHECK(has(length(std::uint64_t{1} << 63), "header length: 9223372036854775808 bytes"));
  CHECK(has(length(~std::uint64_t{0}), "header length: 18446744073709551615 bytes"));
  CHECK(has(length(0), "header: does not begin with '{'"));
  CHECK(has(length(1), "header: is not valid JSON"));
}

TEST_CASE("a header that is no strict JSON object is refused") {
  TempDir dir;
  for (const char* header : {"[]", "null", " {}", "{", "{} x", "{}{}", "{'a':1}", "{\"a\":}", "\xef\xbb\xbf{}"})
    CHECK(has(refusal_of_header(dir, header), "header"));
  CHECK(has(refusal_of_header(dir, std::string("{}\0", 3)), "zero byte"));
  CHECK(has(refusal_of_header(dir, "{\"\xff\":1}"), "not valid JSON"));
  CHECK(has(refusal_of_header(dir, "{\"a\":" + std::string(100000, '[')), "nested deeper"));
  CHECK(has(refusal_of_header(dir, R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                                   R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
            "the key 'a' stands twice"));
  CHECK(has(refusal_of_header(dir, R"({"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}})"),
            "the key 'dtype' stands twice"));
  CHECK(has(refusal_of_header(dir, R"({"__metadata__":{"k":"1","k":"2"}})"), "the key 'k' stands twice"));
  CHECK(has(refusal_of_header(dir, R"({"__metadata__":{"k":1}})"), "metadata 'k': is not a string"));
  CHECK(has(refusal_of_header(dir, R"({"__metadata__":["k"]})"), "__metadata__: is not an object"));
}

TEST_CASE("a tensor entry that is malformed is refused by name") {
  TempDir dir;
  const auto entry = [&](const std::string& json, std::size_t data = 8) {
    const auto message = refusal_of_header(dir, "{\"w\":" + json + "}", data);
    CHECK(has(message, "tensor 'w'"));
    return message;
  };
  CHECK(has(entry("1"), "is not an object"));
  CHECK(has(entry(R"({"dtype":"F32","shape":[2]})"), "data_offsets is missing"));
  CHECK(has(entry(R"({"dtype":"F32","data_offsets":[0,8]})"), "shape is missing"));
  CHECK(has(entry(R"({"shape":[2],"data_offsets":[0,8]})"), "dtype is missing"));
  CHECK(has(entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1})"), "unknown field 'more'"));
  CHECK(has(entry(R"({"dtype":"F33","shape":[2],"data_offsets":[0,8]})"), "dtype \"F33\" is unknown"));
  CHECK(has(entry(R"({"dtype":3,"shape":[2],"data_offsets":[0,8]})"), "dtype 3 is unknown"));
  CHECK(has(entry(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})"), "shape is not a list"));
  for (const char* dim : {"-1", "2.0", "\"2\"", "null", "9223372036854775808", "18446744073709551616", "1e3"})
    CHECK(has(entry(std::string(R"({"dtype":"F32","shape":[)") + dim + R"(],"data_offsets":[0,8]})"), "shape ["));
  // 2^62 elements of 4 bytes, and 2^32 * 2^32 of them: both products are 0 modulo 2^64.
  CHECK(has(entry(R"({"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})", 0), "more than 2^64 bytes"));
  CHECK(has(entry(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0), "more than 2^64"));
  for (const char* offsets : {"[0]", "[0,8,8]", "[-1,7]", "[0,8.0]", "{}", "[0,18446744073709551616]"})
    CHECK(has(entry(std::string(R"({"dtype":"F32","shape":[2],"data_offsets":)") + offsets + "}"), "two byte counts"));
  CHECK(has(entry(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "leave the data"));
  CHECK(has(entry(R"({"dtype":"F32","shape":[2],"data_offsets":[8,16]})"), "leave the data, which has 8 bytes"));
  CHECK(has(entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,9223372036854775808]})"), "leave the data"));
  CHECK(
      has(entry(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), "hold 8 bytes, but shape [3] of F32 needs 12"));
  CHECK(has(entry(R"({"dtype":"F16","shape":[2],"data_offsets":[0,8]})"), "needs 4"));
}

TEST_CASE("offsets that overlap, leave a gap or leave bytes over are refused") {
  TempDir dir;
  const auto two = [&](int a0, int a1, int b0, int b1, std::size_t data) {
    const auto tensor = [](int from, int to) {
      return "{\"dtype\":\"U8\",\"shape\":[" + std::to_string(to - from) + "],\"data_offsets\":[" +
             std::to_string(from) + "," + std::to_string(to) + "]}";
    };
    const std::string header = "{\"a\":" + tensor(a0, a1) + ",\"b\":" + tensor(b0, b1) + "}";
    return refusal_of_header(dir, header, data);
  };
  CHECK(has(two(0, 8, 4, 12, 12), "tensor 'b': data_offsets [4, 12] overlap the tensor before; 8 is the next"));
  CHECK(has(two(0, 8, 0, 8, 8), "overlap"));
  CHECK(has(two(0, 4, 6, 8, 8), "tensor 'b': data_offsets [6, 8] leave a gap; 4 is the next"));
  CHECK(has(two(2, 4, 4, 8, 8), "tensor 'a': data_offsets [2, 4] leave a gap"));
  CHECK(has(two(0, 4, 4, 8, 9), "data: the tensors end at byte 8, the file at 9"));
  CHECK(has(two(0, 8, 4, 4, 8), "overlap"));  // an empty tensor inside another
  CHECK(has(refusal_of_header(dir, "{}", 1), "data: the tensors end at byte 0"));
}
