// What libFuzzer calls, for every target alike.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fuzz/common/target.hpp"
#include "kvevict/core/error.hpp"

extern "C" {
std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);
int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed);
}

namespace kvevict::fuzz {

std::size_t mutate_bytes(std::uint8_t* data, std::size_t size, std::size_t most) {
  return LLVMFuzzerMutate(data, size, most);
}

std::string mutate_text(std::string text, std::size_t growth) {
  const std::size_t size = text.size();
  text.resize(size + growth);
  text.resize(mutate_bytes(reinterpret_cast<std::uint8_t*>(text.data()), size, text.size()));
  return text;
}

void use(double value) {
  [[maybe_unused]] static volatile double sink = 0;
  sink = value;
}

}  // namespace kvevict::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvevict;
  try {
    fuzz::target().run({reinterpret_cast<const char*>(data), size});
  } catch (const format_error&) {
  } catch (const std::invalid_argument&) {
  } catch (const std::domain_error&) {
  }
  return 0;
}

std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  using namespace kvevict::fuzz;
  Random random(seed);
  const Target& t = target();
  // libFuzzer begins with a line break. Later a seed comes back now and then, so that none is forgotten.
  if (size < 2 || random.integer(0, 63) == 0) {
    const std::string& s = t.seeds[random.bits() % t.seeds.size()];
    size = std::min(s.size(), most);
    std::memcpy(data, s.data(), size);
    return size;
  }
  if (!t.mutate) return mutate_bytes(data, size, most);
  const std::string out = t.mutate({reinterpret_cast<const char*>(data), size}, most, random);
  if (out.empty() || out.size() > most) return mutate_bytes(data, size, most);
  std::memcpy(data, out.data(), out.size());
  return out.size();
}
