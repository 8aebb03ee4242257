// A whole file as read-only memory. Pages are read when they are touched, so opening a large file costs nothing.
// POSIX. A file that another process shortens while it is mapped ends this process (SIGBUS): writers should rename a
// finished file into place, as AtomicFile does, and readers of files that may change meanwhile use ReadMode::copy.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <span>
#include <utility>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// How a file becomes memory: mapped, or read whole into memory of its own, which no later change of the file reaches.
enum class ReadMode { map, copy };

// Movable; the bytes keep their address.
class MappedFile {
 public:
  MappedFile() = default;
  // Throws format_error where the path is no readable regular file. An empty file maps to no bytes.
  explicit MappedFile(const std::filesystem::path& path, ReadMode mode = ReadMode::map) {
    // O_NONBLOCK: opening a pipe by mistake must not wait for a writer.
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) fail_format(path.string(), ": cannot be opened: ", std::strerror(errno));
    struct stat about {};
    const bool known = ::fstat(file, &about) == 0;
    if (!known || !S_ISREG(about.st_mode)) {
      ::close(file);
      fail_format(path.string(), ": is ", known && S_ISDIR(about.st_mode) ? "a folder" : "not a regular file",
                  "; a regular file is required");
    }
    size_ = static_cast<std::size_t>(about.st_size);
    const bool copy = mode == ReadMode::copy;
    if (size_ != 0)
      data_ = copy ? ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                   : ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    int error = errno;
    const bool mapped = data_ != MAP_FAILED;
    const std::size_t got = copy && mapped ? read_all(file, error) : size_;
    ::close(file);  // the mapping stays
    if (!mapped) {
      data_ = nullptr;
      fail_format(path.string(), ": cannot be mapped: ", std::strerror(error));
    }
    if (got != size_) {
      ::munmap(std::exchange(data_, nullptr), size_);
      fail_format(path.string(), ": ", got, " of ", size_,
                  " bytes could be read: ", error != 0 ? std::strerror(error) : "the file was shortened meanwhile");
    }
  }
  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedFile() {
    if (data_) ::munmap(data_, size_);
  }

  std::span<const std::byte> bytes() const& noexcept { return {static_cast<const std::byte*>(data_), size_}; }
  std::span<const std::byte> bytes() const&& = delete;

 private:
  // Bytes that came; fewer than size_ at the end of the file, or with `error` set.
  std::size_t read_all(int file, int& error) {
    std::size_t got = 0;
    for (error = 0; got < size_;) {
      const ::ssize_t n = ::read(file, static_cast<std::byte*>(data_) + got, size_ - got);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) error = errno;
      if (n <= 0) break;
      got += static_cast<std::size_t>(n);
    }
    return got;
  }

  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI
