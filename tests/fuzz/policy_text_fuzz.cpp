// Policies as text: whatever the registry builds prints a text that builds the same again.
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/common/target.hpp"
#include "kvevict/naming/grammar.hpp"
#include "kvevict/naming/standard_parts.hpp"

namespace kvevict::fuzz {
namespace {

const Registry& registry() {
  static const Registry r = standard_registry();
  return r;
}

std::vector<std::string> seeds() {
  std::vector<std::string> out{"ada<pyramid(beta=20)>/snapkv(window=32,pool=max:7)", "lkv-h(file=\"a b\")/lkv-t",
                               "uniform(exact=true)/random(seed=18446744073709551615)"};
  for (const auto& [name, preset] : registry().presets()) {
    out.push_back(name);
    out.push_back(registry().policy(name).specification());
  }
  return out;
}

// Names, keys and signs of the grammar, put in, taken out or doubled.
std::string mutate(std::string_view input, std::size_t most, Random& random) {
  static const std::vector<std::string> pieces = [] {
    std::vector<std::string> out{"/",  "<", ">", "(", ")",  "=",     ",",   ":",
                                 "\"", " ", "0", "1", "-1", "1e300", "nan", "true"};
    for (const auto& name : registry().allocator_names()) out.push_back(name);
    for (const auto& name : registry().scorer_names()) out.push_back(name);
    for (const std::string& text : seeds()) {
      const auto open = text.rfind('('), close = text.rfind(')');
      if (open != text.npos && close != text.npos && close > open) out.push_back(text.substr(open, close - open + 1));
    }
    return out;
  }();
  std::string text(input);
  const auto at = [&] { return random.bits() % (text.size() + 1); };
  for (index_t n = random.integer(1, 3); n > 0; --n) switch (random.integer(0, 4)) {
      case 0:
        text = mutate_text(std::move(text), 8);
        break;
      case 1:
        text.erase(at(), 1 + random.bits() % 6);
        break;
      case 2:
        text.insert(at(), text.substr(at(), 1 + random.bits() % 40));
        break;
      default:
        text.insert(at(), pieces[random.bits() % pieces.size()]);
    }
  if (text.size() > most) text.resize(most);
  return text;
}

void run(std::string_view input) {
  (void)split_outside(input, ',');
  const std::string text = registry().policy(input).specification();
  if (registry().policy(text).specification() != text) std::abort();
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate};
  return t;
}

}  // namespace kvevict::fuzz
