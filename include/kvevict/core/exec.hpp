// Where work runs: memory spaces, and the host execution object that is passed first to everything that computes.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct host_space {
  static constexpr bool host = true;
};
struct cuda_space {  // every span and pointer is a device pointer
  static constexpr bool host = false;
};
template <class S>
concept MemorySpace = requires {
  { S::host } -> std::convertible_to<bool>;
};

// Reusable working memory. Grows to the largest request and keeps it; one call at a time.
class Arena {
 public:
  static constexpr std::size_t alignment = 64;

  Arena() = default;
  explicit Arena(std::size_t bytes) { (void)take(bytes); }

  // At least `bytes` bytes, 64-byte aligned, valid until the next take(). Contents are unspecified.
  std::span<std::byte> take(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();  // before the allocation: the two need not be held at once
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{alignment})));
      size_ = bytes;
    }
    return {memory_.get(), bytes};
  }
  std::size_t bytes() const noexcept { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept { ::operator delete (p, std::align_val_t{alignment}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

// Host execution. `scratch` is optional working memory that is reused from call to call; without it each call takes
// and frees its own. One host_exec serves one call at a time when it carries an arena.
struct host_exec {
  int threads = 1;
  Arena* scratch = nullptr;
};

// Execution on a device: work is queued in a stream (cuda_exec, cuda/exec.cuh).
template <class E>
concept DeviceExec = requires(const E& exec) {
  exec.stream;
};

}  // namespace kvevict::inline KVEVICT_ABI
