// The container of every other file: whatever passes has tensors that lie inside the file.
#include "kvevict/io/safetensors.hpp"

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

std::vector<std::string> seeds() {
  const testing::TempDir folder;
  const std::vector<float> floats{1.f, 2.f, 3.f, 4.f, 5.f, 6.f};
  const std::vector<std::int64_t> numbers{7, 8};
  SafetensorsWriter file;
  file.metadata("format", "anything");
  file.metadata("text", "\"quoted\" \xc3\xa9");
  file.add("floats", {2, 3}, std::span<const float>(floats));
  file.add("numbers", {2}, std::span<const std::int64_t>(numbers));
  file.add("empty", {0, 4}, std::span<const float>());
  file.write(folder / "a");
  SafetensorsWriter().write(folder / "b");
  return {testing::read_bytes(folder / "a"), testing::read_bytes(folder / "b")};
}

void run(std::string_view input) {
  const InputFile file(input);
  const Safetensors read(file.path());
  for (const auto& [name, tensor] : read.tensors()) {
    double sum = static_cast<double>(name.size() + tensor.where.size());
    for (const std::byte b : tensor.bytes) sum += std::to_integer<int>(b);
    if (tensor.dtype == DType::f32)
      for (const float x : tensor.as<float>()) sum += x;
    if (tensor.dtype == DType::i64)
      for (const std::int64_t x : tensor.as<std::int64_t>()) sum += static_cast<double>(x);
    use(sum);
  }
  for (const auto& [key, value] : read.metadata()) use(static_cast<double>(key.size() + value.size()));
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate_safetensors};
  return t;
}

}  // namespace kvevict::fuzz
