#include "fuzz/common/mutate_safetensors.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/raw_safetensors.hpp"
#include "kvevict/io/dtype.hpp"

namespace kvevict::fuzz {
namespace {

using Json = nlohmann::ordered_json;
using testing::RawSafetensors;

template <class List>
const auto& any_of(const List& list, Random& random) {
  return list[random.bits() % std::size(list)];
}

constexpr std::array<const char*, 16> texts{"",           "0",   "1",    "-1",   "2",         "3",
                                            "7",          "64",  "4096", "1e38", "268435456", "2147483647",
                                            "2147483648", "nan", "inf",  "1e-46"};
constexpr std::array<std::int64_t, 12> sizes{0,
                                             1,
                                             2,
                                             3,
                                             4,
                                             5,
                                             8,
                                             1 << 20,
                                             1 << 28,
                                             std::int64_t{1} << 31,
                                             std::int64_t{1} << 40,
                                             std::numeric_limits<std::int64_t>::max()};
constexpr std::array<const char*, 16> types{"F32", "F16", "BF16", "I32", "I64",     "U8",      "F64", "BOOL",
                                            "I8",  "I16", "U16",  "U32", "F8_E4M3", "F8_E5M2", "U64", "X"};

std::optional<RawSafetensors> taken_apart(std::string_view input) {
  std::uint64_t length = 0;
  if (input.size() < 8) return {};
  std::memcpy(&length, input.data(), 8);
  if (length > input.size() - 8) return {};
  RawSafetensors out;
  out.header = Json::parse(input.substr(8, length), nullptr, false);
  if (!out.header.is_object()) return {};
  out.data = input.substr(8 + length);
  return out;
}

bool is_tensor(const Json& t) {
  return t.is_object() && t.contains("dtype") && t["dtype"].is_string() && t.contains("shape") &&
         t["shape"].is_array() && t.contains("data_offsets") && t["data_offsets"].is_array() &&
         t["data_offsets"].size() == 2;
}

// Offsets that follow from the shapes, without gaps; false where the data would outgrow `most`.
bool lay_out(RawSafetensors& file, std::size_t most) {
  std::string data;
  for (auto& [name, t] : file.header.items()) {
    if (name == "__metadata__") continue;
    if (!is_tensor(t)) return false;
    const auto type = dtype_named(t["dtype"].get<std::string>());
    std::uint64_t bytes = type ? dtype_bytes(*type) : 1;
    for (const auto& n : t["shape"])
      if (!n.is_number_unsigned() || __builtin_mul_overflow(bytes, n.get<std::uint64_t>(), &bytes)) return false;
    if (bytes > most - data.size()) return false;
    const auto& begin = t["data_offsets"][0];
    const std::size_t from = begin.is_number_unsigned() ? begin.get<std::size_t>() : 0;
    const std::size_t end = data.size() + bytes;
    std::string piece = from < file.data.size() ? file.data.substr(from, bytes) : std::string();
    piece.resize(bytes, '\0');
    data += piece;
    t["data_offsets"] = {end - bytes, end};
  }
  file.data = std::move(data);
  return true;
}

// A size that occurs, another number, and that wherever the size stands: in shapes and in metadata.
void resize_everywhere(RawSafetensors& file, Json& tensor, Random& random) {
  if (tensor["shape"].empty()) return;
  const Json before = any_of(tensor["shape"], random);
  if (!before.is_number_unsigned()) return;
  const std::uint64_t after = random.bits() % 12;
  for (auto& [name, t] : file.header.items()) {
    if (name == "__metadata__" || !is_tensor(t)) continue;
    for (auto& n : t["shape"])
      if (n == before) n = after;
  }
  if (!file.header.contains("__metadata__")) return;
  for (auto& [key, value] : file.header["__metadata__"].items())
    if (value == before.dump()) value = std::to_string(after);
}

void mutate_metadata(Json& metadata, Random& random) {
  if (!metadata.is_object() || metadata.empty()) return;
  auto at = metadata.begin();
  std::advance(at, static_cast<std::ptrdiff_t>(random.bits() % metadata.size()));
  switch (random.integer(0, 4)) {
    case 0:
      metadata.erase(at.key());
      return;
    case 1:
      if (at.value().is_string()) at.value() = mutate_text(at.value().get<std::string>(), 8);
      return;
    case 2:
      metadata[at.key() + "2"] = at.value();
      return;
    default:
      at.value() = any_of(texts, random);
  }
}

template <class T, std::size_t N>
void put(std::string& data, const std::array<T, N>& values, Random& random) {
  if (data.size() < sizeof(T)) return;
  const T value = any_of(values, random);
  std::memcpy(data.data() + random.bits() % (data.size() / sizeof(T)) * sizeof(T), &value, sizeof(T));
}

void mutate_data(std::string& data, Random& random) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  switch (random.integer(0, 3)) {
    case 0:
      return put(data, std::to_array<std::int32_t>({-1, 0, 1, 2, 3, 5, 23, 1 << 30, 2147483647, -2147483647 - 1}),
                 random);
    case 1:
      return put(data, std::to_array<std::int64_t>({-1, 0, 1, 2, 5, 30, std::int64_t{1} << 40}), random);
    case 2:
      return put(data, std::to_array<float>({0.f, -0.f, infinity, -infinity, 1e38f, 1e-40f, std::nanf("")}), random);
    default:
      data = mutate_text(data, 0);
  }
}

void mutate_tensor(RawSafetensors& file, Random& random) {
  std::vector<std::string> names;
  for (const auto& [name, t] : file.header.items())
    if (name != "__metadata__" && is_tensor(t)) names.push_back(name);
  if (names.empty()) return;
  const std::string name = any_of(names, random);
  Json& tensor = file.header[name];
  switch (random.integer(0, 7)) {
    case 0:
      file.header.erase(name);
      return;
    case 1: {
      const Json copy = tensor;
      file.header[mutate_text(name, 4)] = copy;
      return;
    }
    case 2: {  // two tensors change places
      const Json other = file.header[any_of(names, random)];
      file.header[any_of(names, random)] = tensor;
      file.header[name] = other;
      return;
    }
    case 3:
      tensor["dtype"] = any_of(types, random);
      return;
    case 4:
      if (random.integer(0, 1)) tensor["shape"].push_back(any_of(sizes, random));
      else if (!tensor["shape"].empty()) tensor["shape"].erase(tensor["shape"].size() - 1);
      return;
    case 5:
      tensor["data_offsets"][static_cast<std::size_t>(random.integer(0, 1))] = any_of(sizes, random);
      return;
    case 6:
      if (!tensor["shape"].empty()) tensor["shape"][random.bits() % tensor["shape"].size()] = any_of(sizes, random);
      return;
    default:
      resize_everywhere(file, tensor, random);
  }
}

}  // namespace

std::string mutate_safetensors(std::string_view input, std::size_t most, Random& random) {
  auto file = taken_apart(input);
  if (!file || random.integer(0, 15) == 0) return mutate_text(std::string(input), most - input.size());
  for (index_t n = random.integer(1, 3); n > 0; --n) switch (random.integer(0, 2)) {
      case 0:
        if (file->header.contains("__metadata__")) mutate_metadata(file->metadata(), random);
        break;
      case 1:
        mutate_tensor(*file, random);
        break;
      default:
        mutate_data(file->data, random);
    }
  if (random.integer(0, 7) != 0) (void)lay_out(*file, most);
  std::string header = file->header.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (random.integer(0, 31) == 0) header = mutate_text(std::move(header));
  return RawSafetensors::assemble(header, file->data);
}

}  // namespace kvevict::fuzz
