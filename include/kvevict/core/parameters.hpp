// Parameters as text. A part (scorer, allocator) lists its parameters once:
//
//   static constexpr std::string_view name = "snapkv";
//   template <class Self, class Visit>
//   static void parameters(Self& self, Visit&& visit) { visit("window", self.window); visit("pool", self.pool); }
//
// From that list the full specification is printed and the same text is read back (grammar: docs/naming.md).
// A parameter is a number, bool, std::string, an enum with words_of(), or a type with print_value / parse_value found
// by argument-dependent lookup.
#pragma once
#include <charconv>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>

#include "kvevict/config.hpp"
#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

// An enum whose values count from 0 and have words, which words_of(E) returns as an array, found by argument-dependent
// lookup.
template <class E>
concept WordEnum = std::is_enum_v<E> && requires(E e) {
  words_of(e)[0];
};

template <WordEnum E>
constexpr std::string_view word_of(E value) noexcept {
  return words_of(value)[static_cast<std::size_t>(value)];
}

// ---- values to text ----
inline std::string print_value(bool v) { return v ? "true" : "false"; }
inline std::string print_value(const std::string& v) { return '"' + v + '"'; }
template <class N>
requires(std::integral<N> || std::floating_point<N>) std::string print_value(N v) {
  char buffer[48];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, v).ptr};  // shortest text that reads back the same
}
template <WordEnum E>
std::string print_value(E v) {
  return std::string(word_of(v));
}

// ---- text to values; false where the text is no such value ----
inline bool parse_value(std::string_view s, bool& v) {
  if (s != "true" && s != "false") return false;
  v = s == "true";
  return true;
}
inline bool parse_value(std::string_view s, std::string& v) {
  if (s.size() >= 2 && s.front() == '"' && s.back() == '"') s = s.substr(1, s.size() - 2);
  v = s;
  return true;
}
template <class N>
requires(std::integral<N> || std::floating_point<N>) bool parse_value(std::string_view s, N& v) {
  N value{};
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  if (error != std::errc{} || end != s.data() + s.size()) return false;
  v = value;
  return true;
}
template <WordEnum E>
bool parse_value(std::string_view s, E& v) {
  constexpr auto words = words_of(E{});
  for (std::size_t i = 0; i < words.size(); ++i)
    if (s == words[i]) {
      v = static_cast<E>(i);
      return true;
    }
  return false;
}

// What a value of this type looks like, for messages: "one of a, b", "a whole number".
template <class V>
std::string value_kind(const V&) {
  if constexpr (WordEnum<V>) {
    std::string words;
    for (const std::string_view w : words_of(V{})) words += (words.empty() ? "" : ", ") + std::string(w);
    return "one of " + words;
  } else if constexpr (std::is_same_v<V, bool>) {
    return "true or false";
  } else if constexpr (std::is_integral_v<V>) {
    return "a whole number";
  } else if constexpr (std::is_floating_point_v<V>) {
    return "a number";
  } else {
    return "a value of this parameter";
  }
}

namespace detail {
// Takes any parameter. A named type, since nvcc does not see through a lambda in a concept.
struct AnyParameter {
  template <class V>
  void operator()(std::string_view, const V&) const {}
};
}  // namespace detail

// Sets the parameter `key` of something that lists its parameters. False where it has none of this name. Throws
// std::invalid_argument, naming `who` and the key, where the text is no value of it.
template <class P>
bool set_parameter(std::string_view who, P& part, std::string_view key, std::string_view value) {
  bool known = false;
  P::parameters(part, [&](std::string_view name, auto& member) {
    if (name != key) return;
    known = true;
    if (!parse_value(value, member))
      fail_argument(who, ": ", key, '=', value, " is not ", value_kind(member), ", such as ", print_value(member));
  });
  return known;
}

// A part that lists its parameters.
template <class P>
concept Specified = requires(const P& p) {
  { P::name } -> std::convertible_to<std::string_view>;
  P::parameters(p, detail::AnyParameter{});
};

// name(key=value,...), every parameter printed; a nested part stands in <> behind the name.
template <Specified P>
std::string specification(const P& part) {
  std::string out(P::name);
  if constexpr (requires { part.base; }) out += '<' + specification(part.base) + '>';
  std::string args;
  P::parameters(part, [&](std::string_view key, const auto& value) {
    args += (args.empty() ? "" : ",") + std::string(key) + '=' + print_value(value);
  });
  return args.empty() ? out : out + '(' + args + ')';
}
// Type-erased parts print themselves.
template <class P>
requires(!Specified<P> && requires(const P& p) {
  { p.specification() } -> std::convertible_to<std::string>;
}) std::string specification(const P& part) {
  return part.specification();
}

}  // namespace kvevict::inline KVEVICT_ABI
