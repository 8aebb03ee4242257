// Fields of a file: metadata texts as numbers, and tensors checked against the type and shape that a format asks for.
// Every failure is a format_error that names file and field.
#pragma once
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/safetensors.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Metadata of one file.
class Metadata {
 public:
  explicit Metadata(const Safetensors& file) : file_(file) {}

  // format and version must be these.
  void require_format(std::string_view format, std::string_view version) const {
    if (text("format") != format) fail("format", "'" + text("format") + "'; '" + std::string(format) + "' is required");
    if (text("version") != version)
      fail("version", "'" + text("version") + "'; this reader knows version " + std::string(version));
  }
  bool contains(const std::string& key) const { return file_.metadata().count(key) != 0; }
  const std::string& text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) fail(key, "is missing");
    return found->second;
  }
  std::string text_or(const std::string& key, std::string otherwise) const {
    return contains(key) ? text(key) : otherwise;
  }
  // A whole number from `least` to the largest index_t.
  index_t count(const std::string& key, index_t least) const { return to_count(key, text(key), least); }
  index_t count_or(const std::string& key, index_t least, index_t otherwise) const {
    return contains(key) ? count(key, least) : otherwise;
  }
  // Whole numbers from 0 on, comma separated.
  std::vector<index_t> counts(const std::string& key) const {
    std::vector<index_t> out;
    std::string_view rest = text(key);
    for (;;) {
      const auto comma = rest.find(',');
      out.push_back(to_count(key, rest.substr(0, comma), 0));
      if (comma == rest.npos) return out;
      rest.remove_prefix(comma + 1);
    }
  }
  // One of the words of an enum.
  template <WordEnum E>
  E word(const std::string& key) const {
    E value{};
    if (!contains(key)) fail(key, "is missing; " + value_kind(value) + " is required");
    if (!parse_value(text(key), value)) fail(key, "'" + text(key) + "'; " + value_kind(value) + " is required");
    return value;
  }
  template <WordEnum E>
  E word_or(const std::string& key, E otherwise) const {
    return contains(key) ? word<E>(key) : otherwise;
  }
  // A number above 0 in the range of float.
  double positive(const std::string& key) const {
    const std::string_view s = text(key);
    double value = 0;
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
    if (error != std::errc{} || end != s.data() + s.size() || !(value >= std::numeric_limits<float>::min()) ||
        value > std::numeric_limits<float>::max())
      fail(key, "'" + std::string(s) + "' is not a finite number above 0");
    return value;
  }
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    fail_format(file_.name(), ": metadata '", key, "': ", what);
  }

 private:
  index_t to_count(const std::string& key, std::string_view s, index_t least) const {
    index_t value = 0;
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
    if (error != std::errc{} || end != s.data() + s.size() || value < least)
      fail(key, kvevict::joined_text("'", s, "' is not a whole number from ", least, " to ",
                                     std::numeric_limits<index_t>::max()));
    return value;
  }
  const Safetensors& file_;
};

// Throws format_error unless the tensor has this shape; -1 stands for any size.
inline void require_shape(const TensorView& tensor, std::initializer_list<std::int64_t> shape) {
  bool fits = tensor.shape.size() == shape.size();
  std::size_t i = 0;
  for (const auto n : shape) {
    fits = fits && (n == -1 || tensor.shape[i] == n);
    ++i;
  }
  if (fits) return;
  std::string wanted;
  for (const auto n : shape) wanted += (wanted.empty() ? "" : ", ") + (n == -1 ? "any" : std::to_string(n));
  fail_format(tensor.where, ": shape is ", detail::shape_text(tensor.shape), "; [", wanted, "] is required");
}

// Throws format_error unless the tensor holds f32, f16 or bf16.
inline void require_float(const TensorView& tensor) {
  if (tensor.dtype != DType::f32 && tensor.dtype != DType::f16 && tensor.dtype != DType::bf16)
    fail_format(tensor.where, ": dtype is ", dtype_name(tensor.dtype), "; F32, F16 or BF16 is required");
}

// Calls f with the elements of such a tensor, a span of float, fp16_t or bf16_t. Throws format_error for other types.
template <class F>
decltype(auto) visit_elements(const TensorView& tensor, F&& f) {
  require_float(tensor);
  if (tensor.dtype == DType::f32) return f(tensor.as<float>());
  if (tensor.dtype == DType::f16) return f(tensor.as<fp16_t>());
  return f(tensor.as<bf16_t>());
}

// A sequence of row numbers or positions, all from 0 on and each above the one before.
inline std::span<const index_t> require_ascending(const TensorView& tensor) {
  require_shape(tensor, {-1});
  const auto values = tensor.as<index_t>();
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i] < 0 || (i != 0 && values[i] <= values[i - 1]))
      fail_format(tensor.where, ": entry ", i, " is ", values[i],
                  "; numbers from 0 on, each above the one before, are required");
  return values;
}

// The elements of an f32, f16 or bf16 tensor as T; rounded to nearest where T is narrower.
template <CacheElement T>
std::vector<T> converted(const TensorView& tensor) {
  std::vector<T> out;
  visit_elements(tensor, [&](auto elements) {
    out.reserve(elements.size());
    for (const auto x : elements) out.push_back(from_float<T>(to_float(x)));
  });
  return out;
}

}  // namespace kvevict::inline KVEVICT_ABI
