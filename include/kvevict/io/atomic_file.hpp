// A file that appears whole or not at all: written under a temporary name beside its target, then renamed.
#pragma once
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Failures of the system throw std::system_error that names the file; nothing is left behind then.
//
// A file that is replaced keeps its access rights. One that has several names (hard links) is refused, since replacing
// one name would part it from the others without a word. Temporary files that killed processes left behind for the same
// target are removed: they are the ones that nobody holds locked.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path) : path_(path) {
    if (path_.filename().empty()) fail("is no name of a file", std::make_error_code(std::errc::invalid_argument));
    std::error_code ignored;
    // Through a symbolic link: the link stays, what it points to is replaced.
    if (std::filesystem::is_symlink(path_, ignored)) path_ = std::filesystem::weakly_canonical(path_);
    struct stat old {};
    const bool replaces = ::stat(path_.c_str(), &old) == 0;
    if (replaces && !S_ISREG(old.st_mode))
      fail("is not a regular file", std::make_error_code(std::errc::invalid_argument));
    if (replaces && old.st_nlink > 1)
      fail("has several names (hard links), and replacing it would part them; remove it first, or name another file",
           std::make_error_code(std::errc::too_many_links));
    remove_abandoned();
    open_partial(replaces ? old.st_mode & 0777 : 0666);
    if (replaces && ::fchmod(file_, old.st_mode & 07777) != 0) fail("cannot keep its access rights", last_error());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() { discard(); }

  // Makes sure that there is room for so many bytes, without writing them: to be told before the work, not after it.
  void reserve(std::int64_t bytes) {
    if (bytes <= 0) return;
    const int error = ::posix_fallocate(file_, 0, bytes);
    if (error != 0 && error != EINVAL && error != EOPNOTSUPP)
      fail("cannot be written", {error, std::generic_category()});
    if (::ftruncate(file_, 0) != 0) fail("cannot be written", last_error());
  }

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
    if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("cannot be replaced", last_error());
    partial_.clear();
    const int closed = ::close(file_);  // not before the rename: the lock says that the temporary file is in use
    file_ = -1;
    if (closed != 0) fail("cannot be written", last_error());
    sync_folder();
  }

 private:
  static constexpr std::string_view suffix = ".partial";

  static std::error_code last_error() { return {errno, std::generic_category()}; }
  [[noreturn]] void fail(const char* what, std::error_code why) {
    discard();
    throw std::system_error(why, joined_text(path_.string(), ": ", what));
  }
  void discard() noexcept {
    if (!partial_.empty()) ::unlink(partial_.c_str());
    partial_.clear();
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }
  std::filesystem::path folder() const { return path_.has_parent_path() ? path_.parent_path() : "."; }

  // NAME.PID-COUNT.partial, locked. Somebody who cleans up may come between the two and remove it; then again.
  void open_partial(mode_t mode) {
    static std::atomic<unsigned> count{0};  // two files of one process must not share a temporary name
    for (;;) {
      partial_ = path_;
      partial_ += joined_text('.', ::getpid(), '-', count.fetch_add(1), suffix);
      file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      if (file_ < 0 && errno == EEXIST) continue;
      if (file_ < 0) {
        partial_.clear();
        fail("cannot be written", last_error());
      }
      ::flock(file_, LOCK_EX);  // where a file system has no locks, nobody removes anything
      struct stat about {};
      if (::fstat(file_, &about) == 0 && about.st_nlink > 0) return;
      ::close(file_);
    }
  }

  // Whether `name` is a temporary file of this target: NAME.digits-digits.partial.
  bool is_partial(std::string_view name) const {
    const std::string own = path_.filename().string() + '.';
    if (name.size() <= own.size() + suffix.size() || !name.starts_with(own) || !name.ends_with(suffix)) return false;
    name = name.substr(own.size(), name.size() - own.size() - suffix.size());
    const auto dash = name.find('-');
    return dash != name.npos && dash > 0 && dash + 1 < name.size() &&
           name.find_first_not_of("0123456789-") == name.npos && name.find('-', dash + 1) == name.npos;
  }

  void remove_abandoned() const {
    DIR* entries = ::opendir(folder().c_str());
    if (!entries) return;
    while (const dirent* entry = ::readdir(entries)) {
      if (!is_partial(entry->d_name)) continue;
      const auto left = folder() / entry->d_name;
      const int file = ::open(left.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
      if (file < 0) continue;
      if (::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlink(left.c_str());
      ::close(file);
    }
    ::closedir(entries);
  }

  // The new name is an entry of the folder, which has a buffer of its own.
  void sync_folder() {
    const int folder_file = ::open(folder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_file < 0) return;  // a folder that may be written but not read
    const int error = ::fsync(folder_file) != 0 ? errno : 0;
    ::close(folder_file);
    if (error != 0 && error != EINVAL)  // EINVAL: a file system without such buffers
      fail("is written, but its folder is not on the disk", {error, std::generic_category()});
  }

  std::filesystem::path path_, partial_;
  int file_ = -1;
};

}  // namespace kvevict::inline KVEVICT_ABI
