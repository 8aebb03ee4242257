// The text that names a policy at run time, as a syntax tree (docs/naming.md).
//   policy := name [args] | alloc '/' scorer        args  := '(' key '=' value {',' key '=' value} ')'
//   alloc  := name ['<' alloc '>'] [args]           value := number | word [':' number] | '"' text '"'
//   scorer := name ['<' scorer '>'] [args]
#pragma once
#include <cctype>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

inline constexpr int max_nesting = 8;  // parts inside each other

struct PartText {
  std::string name;
  std::shared_ptr<const PartText> base;                   // the part in <>, or null
  std::vector<std::pair<std::string, std::string>> args;  // as written; quotes stripped
};

struct PolicyText {
  PartText first;  // a preset where there is no scorer, else the allocator
  std::optional<PartText> scorer;
};

namespace detail {

class PolicyParser {
 public:
  explicit PolicyParser(std::string_view text) : text_(text) {}

  PolicyText policy() {
    PolicyText out;
    out.first = part(1);
    if (take('/')) out.scorer = part(1);
    skip_space();
    if (at_ != text_.size()) fail("the end");
    return out;
  }

 private:
  PartText part(int depth) {
    PartText out;
    out.name = word("a name");
    if (take('<')) {
      if (depth == max_nesting)
        fail_argument("policy '", shown(), "': more than ", max_nesting, " parts stand inside each other at column ",
                      at_);
      out.base = std::make_shared<const PartText>(part(depth + 1));
      if (!take('>')) fail("'>'");
    }
    if (take('(')) {
      if (take(')')) return out;
      do {
        std::string key = word("a parameter name");
        if (!take('=')) fail("'='");
        for (const auto& [known, value] : out.args)
          if (known == key) fail_argument("policy '", shown(), "': parameter ", key, " is given twice");
        out.args.emplace_back(std::move(key), value());
      } while (take(','));
      if (!take(')')) fail("',' or ')'");
    }
    return out;
  }

  std::string value() {
    skip_space();
    if (at_ < text_.size() && text_[at_] == '"') {
      const std::size_t end = text_.find('"', at_ + 1);
      if (end == std::string_view::npos) fail("a closing quote");
      std::string out(text_.substr(at_ + 1, end - at_ - 1));
      at_ = end + 1;
      return out;
    }
    std::string out = word("a value");
    while (at_ < text_.size() && text_[at_] == ':') {
      ++at_;
      out += ':' + word("a number");
    }
    return out;
  }

  std::string word(std::string_view what) {
    skip_space();
    const std::size_t first = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) || is_one_of("-_.+", text_[at_])))
      ++at_;
    if (at_ == first) fail(what);
    return std::string(text_.substr(first, at_ - first));
  }

  bool take(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void skip_space() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  // The text, or its beginning where it is long.
  std::string shown() const {
    constexpr std::size_t longest = 200;
    return std::string(text_.substr(0, longest)) + (text_.size() > longest ? "..." : "");
  }
  static bool is_one_of(std::string_view set, char c) { return set.find(c) != std::string_view::npos; }
  [[noreturn]] void fail(std::string_view expected) const {
    fail_argument("policy '", shown(), "': expected ", expected, " at column ", at_ + 1,
                  at_ < text_.size() ? joined_text(", found '", text_[at_], '\'') : std::string(", found the end"));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace detail

inline PolicyText parse_policy(std::string_view text) { return detail::PolicyParser(text).policy(); }

// Splits at the separators outside (), <> and quotes. Empty pieces are an error; so is an empty list.
inline std::vector<std::string> split_outside(std::string_view list, char separator) {
  std::vector<std::string> out(1);
  int depth = 0;
  bool quoted = false;
  for (const char c : list) {
    if (c == '"') quoted = !quoted;
    if (!quoted && (c == '(' || c == '<')) ++depth;
    if (!quoted && (c == ')' || c == '>')) --depth;
    if (c == separator && depth == 0 && !quoted) out.emplace_back();
    else out.back() += c;
  }
  for (std::string& piece : out) {
    while (!piece.empty() && piece.front() == ' ') piece.erase(piece.begin());
    while (!piece.empty() && piece.back() == ' ') piece.pop_back();
    if (piece.empty()) fail_argument("list '", list, "': an entry is empty");
  }
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
