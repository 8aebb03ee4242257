// Foreign text on a terminal. Names, metadata and arguments come from outside; printed as they are, their bytes could
// move the cursor, forge a line of output or reverse the order of what is read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

// One code point of UTF-8 text, or bytes = 0 where it is malformed (overlong, surrogate, cut off, above U+10FFFF).
struct Utf8Point {
  char32_t point = 0;
  std::size_t bytes = 0;
};

constexpr Utf8Point utf8_point(std::string_view s) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
  if (s.empty()) return {};
  if (byte(0) < 0x80) return {byte(0), 1};
  const std::size_t n = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || s.size() < n) return {};
  char32_t point = byte(0) & (0x7fu >> n);
  for (std::size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    point = point << 6 | (byte(i) & 0x3fu);
  }
  constexpr char32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (point < smallest[n] || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff)) return {};
  return {point, n};
}

// Controls, and the marks that change how their neighbours are shown without being seen themselves.
constexpr bool is_unprintable(char32_t p) noexcept {
  const auto within = [p](char32_t first, char32_t last) { return p >= first && p <= last; };
  return p < 0x20 || within(0x7f, 0x9f) || p == 0xad || p == 0x61c || p == 0x180e || within(0x200b, 0x200f) ||
         within(0x2028, 0x202e) || within(0x2060, 0x206f) || p == 0xfeff || within(0xfff0, 0xfffb) ||
         within(0xe0000, 0xe0fff);
}

}  // namespace detail

// `text` as one line of UTF-8 that shows all of itself: line ends and tabs as \n, \r, \t, bytes that are no UTF-8 and
// control characters as \x1b, invisible and direction marks as \u{202e}. Everything else stays as it is. O(bytes).
inline std::string printable(std::string_view text) {
  constexpr char digits[] = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto [point, bytes] = detail::utf8_point(text);
    if (bytes != 0 && !detail::is_unprintable(point)) {
      out += text.substr(0, bytes);
    } else if (point == '\n' || point == '\r' || point == '\t') {
      out += point == '\n' ? "\\n" : point == '\r' ? "\\r" : "\\t";
    } else if (bytes < 2) {
      const auto byte = static_cast<unsigned char>(text[0]);
      out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
    } else {
      out += "\\u{";
      int shift = 20;
      while (shift > 0 && point >> shift == 0) shift -= 4;
      for (; shift >= 0; shift -= 4) out += digits[point >> shift & 15];
      out += '}';
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return out;
}

// Whether every byte belongs to a code point.
inline bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t bytes = detail::utf8_point(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

}  // namespace kvevict::inline KVEVICT_ABI
