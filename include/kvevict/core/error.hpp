// How kvevict reports bad input: one exception per kind, thrown out of line, with a message that says what was wrong,
// where, and what would be right.
#pragma once
#include <charconv>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A file that is not what its format promises. The message names the file and the field.
struct format_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

// One piece of a message: text, a character or a number. Streams would do the same, but every header of the library
// reports errors, and <sstream> costs each of them more than all the rest of its includes.
class TextPart {
 public:
  TextPart(std::string_view text) : kind_(Kind::text), text_(text.data()), size_(text.size()) {}
  TextPart(const std::string& text) : TextPart(std::string_view(text)) {}
  TextPart(const char* text) : TextPart(std::string_view(text)) {}
  TextPart(char c) : kind_(Kind::character), character_(c) {}
  TextPart(std::floating_point auto x) : kind_(Kind::real), real_(static_cast<double>(x)) {}
  template <std::integral T>
  requires(sizeof(T) > 1 || std::same_as<T, bool>) TextPart(T x)
      : kind_(std::is_signed_v<T> ? Kind::signed_number : Kind::number), number_(static_cast<unsigned long long>(x)) {}

  void append_to(std::string& out) const {
    char digits[32];
    std::to_chars_result end{digits, {}};
    switch (kind_) {
      case Kind::text:
        out.append(text_, size_);
        return;
      case Kind::character:
        out.push_back(character_);
        return;
      case Kind::signed_number:
        end = std::to_chars(digits, digits + sizeof digits, static_cast<long long>(number_));
        break;
      case Kind::number:
        end = std::to_chars(digits, digits + sizeof digits, number_);
        break;
      case Kind::real:  // six digits, as printf's %g
        end = std::to_chars(digits, digits + sizeof digits, real_, std::chars_format::general, 6);
        break;
    }
    out.append(digits, end.ptr);
  }

 private:
  enum class Kind : unsigned char { text, character, signed_number, number, real };
  Kind kind_;
  union {
    const char* text_;
    char character_;
    unsigned long long number_;
    double real_;
  };
  std::size_t size_ = 0;
};

[[gnu::noinline, gnu::cold]] inline std::string join(std::initializer_list<TextPart> parts) {
  std::string out;
  for (const TextPart& part : parts) part.append_to(out);
  return out;
}

}  // namespace detail

// Joins its arguments to one text: strings, characters, integers, and floating-point numbers with six digits.
template <class... Parts>
[[nodiscard]] std::string joined_text(const Parts&... parts) {
  return detail::join({detail::TextPart(parts)...});
}

// Wrong argument or combination of arguments (std::invalid_argument).
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_argument(const Parts&... parts) {
  throw std::invalid_argument(detail::join({detail::TextPart(parts)...}));
}

// A value outside the domain of the arithmetic, such as a NaN score (std::domain_error).
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_domain(const Parts&... parts) {
  throw std::domain_error(detail::join({detail::TextPart(parts)...}));
}

// A malformed or unreadable file (format_error).
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_format(const Parts&... parts) {
  throw format_error(detail::join({detail::TextPart(parts)...}));
}

}  // namespace kvevict::inline KVEVICT_ABI
