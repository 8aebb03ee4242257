#include "kvevict/io/atomic_file.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <system_error>

#include "common/temp_dir.hpp"
#include "kvevict/io/file_lock.hpp"

using namespace kvevict;
using kvevict::testing::read_bytes;
using kvevict::testing::TempDir;
using kvevict::testing::write_bytes;

namespace {
void replace(const std::filesystem::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}
unsigned mode_of(const std::filesystem::path& path) {
  struct stat about {};
  REQUIRE(::stat(path.c_str(), &about) == 0);
  return about.st_mode & 07777;
}
}  // namespace

TEST_CASE("a file that is replaced keeps its access rights, and nobody reads it meanwhile who may not") {
  const TempDir dir;
  write_bytes(dir / "secret", "old");
  REQUIRE(::chmod((dir / "secret").c_str(), 0600) == 0);
  {
    AtomicFile file(dir / "secret");
    file.write("new");
    for (const auto& entry : std::filesystem::directory_iterator(dir.path())) CHECK(mode_of(entry.path()) == 0600);
    file.commit();
  }
  CHECK(mode_of(dir / "secret") == 0600);
  CHECK(read_bytes(dir / "secret") == "new");
  const mode_t umask_before = ::umask(022);
  replace(dir / "fresh", "x");
  CHECK(mode_of(dir / "fresh") == 0644);
  REQUIRE(::chmod((dir / "fresh").c_str(), 0666) == 0);
  replace(dir / "fresh", "y");
  CHECK(mode_of(dir / "fresh") == 0666);
  ::umask(umask_before);
}

TEST_CASE("a file of several names is refused rather than parted from the others") {
  const TempDir dir;
  write_bytes(dir / "one", "old");
  std::filesystem::create_hard_link(dir / "one", dir / "two");
  CHECK_THROWS_AS(AtomicFile(dir / "two"), std::system_error);
  CHECK(read_bytes(dir / "one") == "old");
  CHECK(dir.files() == 2);
}

TEST_CASE("what a killed process left behind goes, what a living one writes stays") {
  const TempDir dir;
  const auto target = dir / "out";
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    AtomicFile file(target);
    file.write("half");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  CHECK(dir.files() == 1);
  for (const char* other :
       {"out.partial", "out.1-.partial", "out.1-2-3.partial", "other.1-2.partial", "out.x-1.partial"})
    write_bytes(dir / other, "is somebody else's");
  {
    AtomicFile living(target);
    CHECK(dir.files() == 6);
    replace(target, "second");  // beside the living one
    CHECK(dir.files() == 7);
    living.write("first");
    living.commit();
  }
  CHECK(dir.files() == 6);
  CHECK(read_bytes(target) == "first");
}

TEST_CASE("room that is not there is missed before anything is written") {
  const TempDir dir;
  // A limit on the size of files stands for a full disk.
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  {
    AtomicFile file(dir / "out");
    file.reserve(1 << 20);
    rlimit small = before;
    small.rlim_cur = 1 << 16;
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK_THROWS_AS(file.reserve(1 << 20), std::system_error);
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  }
  std::signal(SIGXFSZ, handler);
  CHECK(dir.files() == 0);
  AtomicFile file(dir / "out");
  file.reserve(1000);
  file.write("abc");
  file.commit();
  CHECK(read_bytes(dir / "out") == "abc");
}

TEST_CASE("a lock is held by one process, and gone with it") {
  const TempDir dir;
  const auto in_child = [&](auto body) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 1;
      try {
        body();
        code = 0;
      } catch (const std::system_error&) {
        code = 2;
      }
      ::_exit(code);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  {
    const FileLock lock(dir / "out");
    CHECK_THROWS_AS(FileLock(dir / "out"), std::system_error);
    CHECK(in_child([&] { FileLock other(dir / "out"); }) == 2);
    CHECK(in_child([&] { FileLock other(dir / "elsewhere"); }) == 0);
  }
  CHECK(dir.files() == 0);
  CHECK(in_child([&] {
          FileLock lock(dir / "out");
          ::kill(::getpid(), SIGKILL);
        }) == -1);
  CHECK(dir.files() == 1);  // left behind, and no hindrance
  const FileLock lock(dir / "out");
}
