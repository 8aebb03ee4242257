// A lock on a file that is being made, so that two processes do not do the same long work and lose one of the results.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Holds TARGET.lock, locked, while it lives. The system gives the lock up when the process ends in whatever way; a file
// that is left behind by a killed one hinders nobody.
class FileLock {
 public:
  // Throws std::system_error where another process holds it, or where it cannot be made.
  explicit FileLock(const std::filesystem::path& target) : path_(std::filesystem::weakly_canonical(target)) {
    path_ += ".lock";
    for (;;) {
      file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      if (file_ < 0) throw std::system_error(errno, std::generic_category(), path_.string() + ": cannot be written");
      if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        ::close(file_);
        throw std::system_error(std::make_error_code(std::errc::device_or_resource_busy),
                                joined_text(target.string(), ": another process is writing it and holds ",
                                            path_.string(), "; wait for it, or name another file"));
      }
      // Whoever held it may have removed the file between our opening and our locking it.
      struct stat here {
      }, named{};
      if (::fstat(file_, &here) == 0 && ::stat(path_.c_str(), &named) == 0 && here.st_ino == named.st_ino &&
          here.st_dev == named.st_dev)
        return;
      ::close(file_);
    }
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() {
    ::unlink(path_.c_str());
    ::close(file_);
  }

 private:
  std::filesystem::path path_;
  int file_ = -1;
};

}  // namespace kvevict::inline KVEVICT_ABI
