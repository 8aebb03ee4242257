#include "kvevict/io/shipped.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "common/temp_dir.hpp"

using namespace kvevict;
using kvevict::testing::TempDir;

TEST_CASE("shipped:NAME is found in $KVEVICT_DATA first, then where it was installed; other texts are paths") {
  const TempDir first, second;
  testing::write_bytes(second / "part.safetensors", "x");
  const std::vector<std::filesystem::path> folders{first.path(), second.path()};
  const char* before = std::getenv("KVEVICT_DATA");
  const std::string saved = before ? before : "";
  ::unsetenv("KVEVICT_DATA");
  CHECK(resolve_shipped("shipped:part", folders) == second / "part.safetensors");
  CHECK(resolve_shipped("shipped", folders) == "shipped");
  CHECK(resolve_shipped("a/b.safetensors", {}) == "a/b.safetensors");
  try {
    (void)resolve_shipped("shipped:none", folders);
    FAIL("found what is not there");
  } catch (const format_error& e) {
    const std::string what = e.what();
    for (const std::string& part :
         {std::string("none.safetensors"), first.path().string(), second.path().string(), std::string("KVEVICT_DATA")})
      CHECK(what.find(part) != what.npos);
  }
  CHECK_THROWS_AS((void)resolve_shipped("shipped:part", {}), format_error);
  testing::write_bytes(first / "part.safetensors", "y");
  ::setenv("KVEVICT_DATA", second.path().c_str(), 1);
  CHECK(resolve_shipped("shipped:part", folders) == second / "part.safetensors");
  CHECK(resolve_shipped("shipped:part", {}) == second / "part.safetensors");
  if (before) ::setenv("KVEVICT_DATA", saved.c_str(), 1);
  else ::unsetenv("KVEVICT_DATA");
}
