// How kvevict reports bad input: one exception per kind, thrown out of line, with a message that says what was wrong,
// where, and what would be right.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "kvevict/config.hpp"

namespace kvevict::inline KVEVICT_ABI {

// A file that is not what its format promises. The message names the file and the field.
struct format_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Joins its arguments to one text, as operator<< prints them.
template <class... Parts>
std::string joined_text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Wrong argument or combination of arguments (std::invalid_argument).
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_argument(const Parts&... parts) {
  throw std::invalid_argument(joined_text(parts...));
}

// A value outside the domain of the arithmetic, such as a NaN score (std::domain_error).
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_domain(const Parts&... parts) {
  throw std::domain_error(joined_text(parts...));
}

// A malformed or unreadable file (format_error).
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail_format(const Parts&... parts) {
  throw format_error(joined_text(parts...));
}

}  // namespace kvevict::inline KVEVICT_ABI
