// A byte buffer that really gives memory back. Large buffers are anonymous mappings: shrinking unmaps whole pages at
// once (malloc may keep freed memory for later), growing moves page tables instead of bytes. Small buffers, and all of
// them where there is no mmap, live on the heap.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include "kvevict/config.hpp"
#endif

namespace kvevict::inline KVEVICT_ABI::detail {

class PageBuffer {
 public:
  // From this size on a buffer is mapped.
  static constexpr std::size_t mapped_from = std::size_t{128} << 10;

  PageBuffer() = default;
  PageBuffer(const PageBuffer& other) : data_(take(other.size_)), size_(other.size_) {
    if (size_ != 0) std::memcpy(data_, other.data_, size_);
  }
  PageBuffer(PageBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  PageBuffer& operator=(PageBuffer other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~PageBuffer() { give(data_, size_); }

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool contains(const void* p) const noexcept {
    const auto at = reinterpret_cast<std::uintptr_t>(p), first = reinterpret_cast<std::uintptr_t>(data_);
    return at >= first && at - first < size_;
  }
  // Bytes that are really held: whole pages where mapped.
  std::size_t reserved() const noexcept { return held(size_); }

  // Keeps the first min(old, new) bytes; the rest is unspecified. On std::bad_alloc nothing has changed.
  void resize(std::size_t bytes) {
    if (bytes == size_) return;
    if (bytes == 0) {
      give(data_, size_);
      data_ = nullptr;
    } else if (size_ == 0) {
      data_ = take(bytes);
    } else if (mapped(size_) && mapped(bytes)) {
      data_ = remap(data_, size_, bytes);
    } else if (!mapped(size_) && !mapped(bytes)) {
      void* moved = std::realloc(data_, bytes);
      if (!moved) throw std::bad_alloc();
      data_ = static_cast<std::byte*>(moved);
    } else {
      std::byte* moved = take(bytes);
      std::memcpy(moved, data_, std::min(size_, bytes));
      give(data_, size_);
      data_ = moved;
    }
    size_ = bytes;
  }

 private:
#if defined(__linux__)
  static bool mapped(std::size_t bytes) noexcept { return bytes >= mapped_from; }
  static std::size_t held(std::size_t bytes) noexcept {
    if (!mapped(bytes)) return bytes;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
  }
  static std::byte* map(std::size_t bytes) {
    void* p = mmap(nullptr, held(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(p);
  }
  static std::byte* remap(std::byte* data, std::size_t bytes, std::size_t new_bytes) {
    void* p = mremap(data, held(bytes), held(new_bytes), MREMAP_MAYMOVE);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(p);
  }
  static void unmap(std::byte* data, std::size_t bytes) noexcept { munmap(data, held(bytes)); }
#else
  static bool mapped(std::size_t) noexcept { return false; }
  static std::size_t held(std::size_t bytes) noexcept { return bytes; }
  static std::byte* map(std::size_t) { throw std::bad_alloc(); }
  static std::byte* remap(std::byte*, std::size_t, std::size_t) { throw std::bad_alloc(); }
  static void unmap(std::byte*, std::size_t) noexcept {}
#endif

  static std::byte* take(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    if (mapped(bytes)) return map(bytes);
    void* p = std::malloc(bytes);
    if (!p) throw std::bad_alloc();
    return static_cast<std::byte*>(p);
  }
  static void give(std::byte* data, std::size_t bytes) noexcept {
    if (!data) return;
    if (mapped(bytes)) unmap(data, bytes);
    else std::free(data);
  }

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
