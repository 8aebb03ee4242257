// A file that appears whole or not at all: written under a temporary name beside its target, then renamed.
#pragma once
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Failures of the system throw std::system_error that names the file; nothing is left behind then.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path) : path_(path) {
    if (path_.filename().empty()) fail("is no name of a file", std::make_error_code(std::errc::invalid_argument));
    std::error_code ignored;
    // Through a symbolic link: the link stays, what it points to is replaced.
    if (std::filesystem::is_symlink(path_, ignored)) path_ = std::filesystem::weakly_canonical(path_);
    const auto kind = std::filesystem::status(path_, ignored).type();
    if (kind != std::filesystem::file_type::not_found && kind != std::filesystem::file_type::regular)
      fail("is not a regular file", std::make_error_code(std::errc::invalid_argument));
    static std::atomic<unsigned> count{0};  // two files of one process must not share a temporary name
    do {
      partial_ = path_;
      partial_ += joined_text('.', ::getpid(), '-', count.fetch_add(1), ".partial");
      file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (file_ < 0 && errno == EEXIST);
    if (file_ < 0) fail("cannot be written", last_error());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() { discard(); }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(file_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("cannot be written", last_error());
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }
  void write(std::string_view s) { write(std::as_bytes(std::span(s.data(), s.size()))); }

  // Everything is on the disk and has its name when this returns. Without it the file never appears.
  void commit() {
    if (::fsync(file_) != 0) fail("cannot be written", last_error());
    const int closed = ::close(file_);
    file_ = -1;
    if (closed != 0) fail("cannot be written", last_error());
    if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("cannot be replaced", last_error());
    partial_.clear();
  }

 private:
  static std::error_code last_error() { return {errno, std::generic_category()}; }
  [[noreturn]] void fail(const char* what, std::error_code why) {
    discard();
    throw std::system_error(why, joined_text(path_.string(), ": ", what));
  }
  void discard() noexcept {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
    if (!partial_.empty()) ::unlink(partial_.c_str());
    partial_.clear();
  }

  std::filesystem::path path_, partial_;
  int file_ = -1;
};

}  // namespace kvevict::inline KVEVICT_ABI
