// The contents of a file as one number: XXH64 (Collet, https://github.com/Cyan4973/xxHash, specification 0.1.1). It
// tells contents apart that differ by accident; it is no protection against somebody who looks for a collision.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

static_assert(std::endian::native == std::endian::little, "the hash reads words as they lie");

// Takes bytes in pieces of any size; the result depends on their sequence alone.
class Xxh64 {
 public:
  void update(std::span<const std::byte> bytes) noexcept {
    length_ += bytes.size();
    if (filled_ != 0) {
      const std::size_t n = std::min(bytes.size(), block - filled_);
      std::memcpy(rest_ + filled_, bytes.data(), n);
      filled_ += n;
      bytes = bytes.subspan(n);
      if (filled_ < block) return;
      take_block(rest_);
      filled_ = 0;
    }
    for (; bytes.size() >= block; bytes = bytes.subspan(block)) take_block(bytes.data());
    filled_ = bytes.size();
    if (filled_ != 0) std::memcpy(rest_, bytes.data(), filled_);
  }

  // Of everything so far; more may follow.
  std::uint64_t value() const noexcept {
    std::uint64_t h = p5;
    if (length_ >= block) {
      h = std::rotl(lane_[0], 1) + std::rotl(lane_[1], 7) + std::rotl(lane_[2], 12) + std::rotl(lane_[3], 18);
      for (const std::uint64_t lane : lane_) h = (h ^ mixed(0, lane)) * p1 + p4;
    }
    h += length_;
    std::size_t at = 0;
    for (; at + 8 <= filled_; at += 8) h = std::rotl(h ^ mixed(0, word<std::uint64_t>(rest_ + at)), 27) * p1 + p4;
    if (at + 4 <= filled_) {
      h = std::rotl(h ^ word<std::uint32_t>(rest_ + at) * p1, 23) * p2 + p3;
      at += 4;
    }
    for (; at < filled_; ++at) h = std::rotl(h ^ std::to_integer<std::uint64_t>(rest_[at]) * p5, 11) * p1;
    h = (h ^ h >> 33) * p2;
    h = (h ^ h >> 29) * p3;
    return h ^ h >> 32;
  }

 private:
  static constexpr std::uint64_t p1 = 11400714785074694791u, p2 = 14029467366897019727u, p3 = 1609587929392839161u,
                                 p4 = 9650029242287828579u, p5 = 2870177450012600261u;
  static constexpr std::size_t block = 32;

  template <class W>
  static std::uint64_t word(const std::byte* from) noexcept {
    W w;
    std::memcpy(&w, from, sizeof w);
    return w;
  }
  static std::uint64_t mixed(std::uint64_t lane, std::uint64_t input) noexcept {
    return std::rotl(lane + input * p2, 31) * p1;
  }
  void take_block(const std::byte* from) noexcept {
    for (std::size_t i = 0; i < 4; ++i) lane_[i] = mixed(lane_[i], word<std::uint64_t>(from + 8 * i));
  }

  std::uint64_t lane_[4] = {p1 + p2, p2, 0, 0 - p1};
  std::uint64_t length_ = 0;
  std::byte rest_[block];
  std::size_t filled_ = 0;
};

// "xxh64:" and 16 digits, of the whole contents. Throws format_error where the file cannot be read. It is read, not
// mapped: a file that shrinks meanwhile ends nothing.
inline std::string file_digest(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail_format(path.string(), ": cannot be opened: ", std::strerror(errno));
  Xxh64 hash;
  std::vector<std::byte> buffer(std::size_t{1} << 20);
  for (;;) {
    const ssize_t n = ::read(file, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int why = errno;
      ::close(file);
      fail_format(path.string(), ": cannot be read: ", std::strerror(why));
    }
    if (n == 0) break;
    hash.update(std::span(buffer).first(static_cast<std::size_t>(n)));
  }
  ::close(file);
  constexpr char digits[] = "0123456789abcdef";
  std::string out = "xxh64:";
  for (int shift = 60; shift >= 0; shift -= 4) out += digits[hash.value() >> shift & 15];
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
