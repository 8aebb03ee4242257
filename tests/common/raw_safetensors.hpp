// A safetensors file taken apart, so that a test can break it in one place and write it again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/temp_dir.hpp"

namespace kvevict::testing {

struct RawSafetensors {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::string data;

  static std::string assemble(std::string_view header_text, std::string_view data) {
    const std::uint64_t length = header_text.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &length, 8);
    return out.append(header_text).append(data);
  }

  RawSafetensors() = default;
  explicit RawSafetensors(const std::filesystem::path& path) {
    const std::string bytes = read_bytes(path);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    header = nlohmann::ordered_json::parse(bytes.substr(8, length));
    data = bytes.substr(8 + length);
  }
  nlohmann::ordered_json& metadata() { return header["__metadata__"]; }
  // Adds a tensor of zeros behind the others.
  void append(const std::string& name, std::string_view dtype, const std::vector<std::int64_t>& shape,
              std::size_t bytes) {
    header[name] = {
        {"dtype", std::string(dtype)}, {"shape", shape}, {"data_offsets", {data.size(), data.size() + bytes}}};
    data.append(bytes, '\0');
  }
  // Takes a tensor and its bytes away and closes the gap.
  void remove(const std::string& name) {
    const auto begin = header[name]["data_offsets"][0].get<std::size_t>();
    const auto size = header[name]["data_offsets"][1].get<std::size_t>() - begin;
    header.erase(name);
    data.erase(begin, size);
    for (auto& [key, tensor] : header.items())
      if (key != "__metadata__" && tensor["data_offsets"][0].get<std::size_t>() >= begin + size)
        for (auto& offset : tensor["data_offsets"]) offset = offset.get<std::size_t>() - size;
  }
  // The stored elements of a tensor, to be changed in place.
  template <class T>
  T* elements(const std::string& name) {
    return reinterpret_cast<T*>(data.data() + header[name]["data_offsets"][0].get<std::size_t>());
  }
  void save(const std::filesystem::path& path) const { write_bytes(path, assemble(header.dump(), data)); }
};

// The message of the E that f throws; a remark where it throws nothing. Anything else passes through and fails.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

inline bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

}  // namespace kvevict::testing
