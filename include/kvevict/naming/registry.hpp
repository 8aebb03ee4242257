// Registry: policies by name at run time. Holds the parts and presets it was given; nothing is global. The parts of
// this library are added by naming/standard_parts.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/naming/any.hpp"
#include "kvevict/naming/grammar.hpp"

namespace kvevict::inline KVEVICT_ABI {

class Registry {
 public:
  // `defaults` is the part that a bare name means; arguments change its parameters.
  template <Specified S>
  void add_scorer(S defaults = {}) {
    scorers_.insert_or_assign(std::string(S::name),
                              Entry<AnyScorer>{keys_of(defaults), [defaults](const Registry&, const PartText& t) {
                                                 if (t.base)
                                                   fail_argument("scorer ", t.name, " wraps no scorer; '", t.base->name,
                                                                 "' was given");
                                                 return AnyScorer(with_arguments(defaults, t));
                                               }});
  }

  // A scorer that wraps another one: Wrapper<> alone, Wrapper<AnyScorer> around the part in <>.
  template <template <class...> class Wrapper>
  void add_wrapping_scorer() {
    using Alone = Wrapper<>;
    scorers_.insert_or_assign(
        std::string(Alone::name),
        Entry<AnyScorer>{keys_of(Alone{}), [](const Registry& registry, const PartText& t) {
                           if (!t.base) return AnyScorer(with_arguments(Alone{}, t));
                           return AnyScorer(with_arguments(Wrapper<AnyScorer>{{registry.scorer(*t.base)}}, t));
                         }});
  }

  template <Specified A>
  void add_allocator(A defaults = {}) {
    allocators_.insert_or_assign(std::string(A::name),
                                 Entry<AnyAllocator>{keys_of(defaults), [defaults](const Registry&, const PartText& t) {
                                                       if (t.base)
                                                         fail_argument("allocator ", t.name,
                                                                       " takes no nested allocator; '", t.base->name,
                                                                       "' was given");
                                                       return AnyAllocator(with_arguments(defaults, t));
                                                     }});
  }

  // An allocator that refines another one: Nested<> alone, Nested<AnyAllocator> around the part in <>.
  template <template <class...> class Nested>
  void add_nesting_allocator() {
    using Alone = Nested<>;
    allocators_.insert_or_assign(
        std::string(Alone::name),
        Entry<AnyAllocator>{keys_of(Alone{}), [](const Registry& registry, const PartText& t) {
                              if (!t.base) return AnyAllocator(with_arguments(Alone{}, t));
                              using Base = decltype(Alone::base);
                              if (t.base->name == Base::name && !t.base->base) {
                                Alone alone;  // typed, as in the bare name: Nested<> may know its own base
                                alone.base = with_arguments(Base{}, *t.base);
                                return AnyAllocator(with_arguments(alone, t));
                              }
                              AnyAllocator base = registry.allocator(*t.base);
                              if (base.kind() != AllocatorKind::fixed)
                                fail_argument("allocator ", t.name, '<', t.base->name, ">: '", t.base->name,
                                              "' depends on scores; only a static allocator can be refined");
                              return AnyAllocator(with_arguments(Nested<AnyAllocator>{std::move(base)}, t));
                            }});
  }

  // `text` is what `name` stands for, as allocator/scorer.
  void add_preset(std::string name, std::string text, std::string about) {
    presets_.insert_or_assign(std::move(name), Preset{std::move(text), std::move(about)});
  }

  struct Preset {
    std::string text, about;
  };
  const std::map<std::string, Preset, std::less<>>& presets() const noexcept { return presets_; }
  std::vector<std::string> scorer_names() const { return names_of(scorers_); }
  std::vector<std::string> allocator_names() const { return names_of(allocators_); }

  // Builds what the text names. Throws std::invalid_argument: a syntax error with its column, an unknown name with
  // the nearest known ones, an unknown parameter with those there are, a bad value with what it may be.
  AnyPolicy policy(std::string_view text) const {
    const PolicyText tree = parse_policy(text);
    if (tree.scorer) return {allocator(tree.first), scorer(*tree.scorer), {}};
    const auto preset = presets_.find(tree.first.name);
    if (preset == presets_.end() || tree.first.base) fail_unknown(tree.first);
    PolicyText expanded = parse_policy(preset->second.text);
    // An argument of a preset goes to each part that has such a parameter, and to the allocator where none has.
    for (const auto& argument : tree.first.args) {
      const bool scorers = entry(scorers_, *expanded.scorer, "scorer").has(argument.first);
      if (scorers) set_argument(*expanded.scorer, argument);
      if (!scorers || entry(allocators_, expanded.first, "allocator").has(argument.first))
        set_argument(expanded.first, argument);
    }
    return {allocator(expanded.first), scorer(*expanded.scorer), {}};
  }

  AnyScorer scorer(const PartText& text) const {
    const bool other = allocators_.count(text.name) != 0;
    return entry(scorers_, text, "scorer", other ? "; it is an allocator" : "").make(*this, text);
  }
  AnyAllocator allocator(const PartText& text) const {
    const bool other = scorers_.count(text.name) != 0;
    return entry(allocators_, text, "allocator", other ? "; it is a scorer" : "").make(*this, text);
  }

 private:
  template <class Any>
  struct Entry {
    std::vector<std::string> keys;
    std::function<Any(const Registry&, const PartText&)> make;
    bool has(const std::string& key) const { return std::find(keys.begin(), keys.end(), key) != keys.end(); }
  };
  template <class Any>
  using Entries = std::map<std::string, Entry<Any>, std::less<>>;

  template <class P>
  static std::vector<std::string> keys_of(const P& part) {
    std::vector<std::string> keys;
    P::parameters(part, [&](std::string_view key, const auto&) { keys.emplace_back(key); });
    return keys;
  }

  template <class P>
  static P with_arguments(P part, const PartText& text) {
    for (const auto& [key, value] : text.args)
      if (!set_parameter(P::name, part, key, value))
        fail_argument(P::name, ": no parameter '", key, '\'', nearest(key, keys_of(part)));
    return part;
  }

  static void set_argument(PartText& part, const std::pair<std::string, std::string>& argument) {
    for (auto& known : part.args)
      if (known.first == argument.first) {
        known.second = argument.second;
        return;
      }
    part.args.push_back(argument);
  }

  template <class Any>
  static const Entry<Any>& entry(const Entries<Any>& entries, const PartText& text, std::string_view what,
                                 std::string_view hint = "") {
    const auto found = entries.find(text.name);
    if (found == entries.end())
      fail_argument("unknown ", what, " '", text.name, '\'', hint, nearest(text.name, names_of(entries)));
    return found->second;
  }

  // A text of one part that is no policy, with what it may have been meant for.
  [[noreturn]] void fail_unknown(const PartText& part) const {
    const std::string written = written_name(part);
    std::string hint;
    if (scorers_.count(part.name)) hint = "; it is a scorer: uniform/" + written;
    if (allocators_.count(part.name)) hint = "; it is an allocator: " + written + "/snapkv, or another scorer";
    fail_argument("unknown policy '", written, '\'', hint, nearest(part.name, names_of(presets_)));
  }
  static std::string written_name(const PartText& part) {
    return part.base ? part.name + '<' + written_name(*part.base) + '>' : part.name;
  }

  template <class Map>
  static std::vector<std::string> names_of(const Map& map) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : map) names.push_back(name);
    return names;
  }

  // "; did you mean a, b or c?" by edit distance.
  static std::string nearest(const std::string& name, std::vector<std::string> known) {
    if (known.empty()) return "; there are none";
    std::stable_sort(known.begin(), known.end(),
                     [&](const std::string& a, const std::string& b) { return distance(name, a) < distance(name, b); });
    if (known.size() > 3) known.resize(3);
    std::string out = "; nearest known: ";
    for (std::size_t i = 0; i < known.size(); ++i) out += (i ? ", " : "") + known[i];
    return out;
  }

  static std::size_t distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < a.size(); ++i) {
      std::size_t diagonal = row[0];
      row[0] = i + 1;
      for (std::size_t j = 0; j < b.size(); ++j) {
        const std::size_t replaced = diagonal + (a[i] != b[j]);
        diagonal = row[j + 1];
        row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, replaced});
      }
    }
    return row.back();
  }

  Entries<AnyScorer> scorers_;
  Entries<AnyAllocator> allocators_;
  std::map<std::string, Preset, std::less<>> presets_;
};

}  // namespace kvevict::inline KVEVICT_ABI
