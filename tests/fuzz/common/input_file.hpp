// An input as a file that readers can open and map, without touching a disk.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace kvevict::fuzz {

class InputFile {
 public:
  InputFile() : file_(::memfd_create("kvevict-fuzz", 0)) {
    if (file_ < 0) std::abort();
  }
  explicit InputFile(std::string_view bytes) : InputFile() { set(bytes); }
  ~InputFile() { ::close(file_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  void set(std::string_view bytes) {
    if (::ftruncate(file_, 0) != 0 ||
        ::pwrite(file_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      std::abort();
  }
  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

}  // namespace kvevict::fuzz
