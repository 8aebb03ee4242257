// A fuzz target: small valid inputs to begin with, a reader to try, and a mutation that knows the input's form. Each
// *_fuzz.cpp defines target(); driver.cpp gives it to libFuzzer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/random_cache.hpp"

namespace kvevict::fuzz {

using testing::Random;

// libFuzzer's own mutation of bytes, in place; returns the new size, at most `most`.
std::size_t mutate_bytes(std::uint8_t* data, std::size_t size, std::size_t most);
// The same for a text, which may grow by `growth` bytes.
std::string mutate_text(std::string text, std::size_t growth = 64);

struct Target {
  // Valid inputs of a few kilobytes at most. The corpus starts from them and nothing else.
  std::vector<std::string> seeds;
  // Reads the input and walks whatever the reader lets pass. Returns normally, or throws std::invalid_argument,
  // std::domain_error or format_error: every other exception is a finding, as is what the sanitizers see.
  void (*run)(std::string_view input) = nullptr;
  // An input near this one; null: libFuzzer's mutation of bytes.
  std::string (*mutate)(std::string_view input, std::size_t most, Random& random) = nullptr;
};

const Target& target();

// What is read stays read: a sum that the optimiser may not leave out.
void use(double value);

}  // namespace kvevict::fuzz
