#include "kvevict/io/digest.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "common/temp_dir.hpp"

using namespace kvevict;
using kvevict::testing::TempDir;

namespace {
std::uint64_t hash_of(std::string_view s, std::size_t piece) {
  Xxh64 hash;
  for (std::size_t at = 0; at < s.size(); at += piece) hash.update(std::as_bytes(std::span(s.substr(at, piece))));
  return hash.value();
}
}  // namespace

TEST_CASE("XXH64: published values, in pieces of any size") {
  const std::string_view text = "Nobody inspects the spammish repetition";
  CHECK(hash_of("", 1) == 0xef46db3751d8e999u);
  CHECK(hash_of("a", 1) == 0xd24ec4f1a98c6e5bu);
  CHECK(hash_of("abc", 3) == 0x44bc2cf5ad770999u);
  for (const std::size_t piece : {1u, 3u, 31u, 32u, 33u, 39u}) CHECK(hash_of(text, piece) == 0xfbcea83c8a378bf1u);
}

TEST_CASE("a file's digest is that of its contents, and a flipped bit changes it") {
  const TempDir dir;
  std::string content(3'000'001, 'x');
  testing::write_bytes(dir / "a", content);
  const std::string before = file_digest(dir / "a");
  CHECK(before.size() == 6 + 16);
  CHECK(before.starts_with("xxh64:"));
  testing::write_bytes(dir / "b", content);
  CHECK(file_digest(dir / "b") == before);
  content[2'000'000] ^= 1;
  testing::write_bytes(dir / "b", content);
  CHECK(file_digest(dir / "b") != before);
  testing::write_bytes(dir / "abc", "abc");
  CHECK(file_digest(dir / "abc") == "xxh64:44bc2cf5ad770999");
  CHECK_THROWS_AS((void)file_digest(dir / "none"), format_error);
  CHECK_THROWS_AS((void)file_digest(dir.path()), format_error);
}
