// NumPy's npy files as xtensor arrays, and layers recorded as npy files as a cache. The header is read here and checked
// against the file's size, because xtensor's own reader trusts it and knows only one order of its fields.
// Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "kvevict/cache/recorded.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/interop/xtensor_headers.hpp"
#include "kvevict/io/atomic_file.hpp"
#include "kvevict/io/mapped_file.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {

struct NpyHeader {
  bool f8 = false, fortran_order = false;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;
};

// The header is a Python dictionary with three known keys; this reads exactly that.
class NpyHeaderText {
 public:
  NpyHeaderText(std::string_view rest, const std::string& file) : rest_(rest), file_(file) {}

  NpyHeader read() {
    NpyHeader out;
    bool seen[3] = {};
    expect('{');
    while (!take('}')) {
      const std::string_view key = quoted();
      expect(':');
      const int which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : 3;
      if (which == 3 || std::exchange(seen[which], true)) fail("header: field '", key, "' is unknown or stands twice");
      if (which == 0) out.f8 = dtype();
      else if (which == 1) out.fortran_order = boolean();
      else out.shape = tuple();
      if (take('}')) break;
      expect(',');
    }
    skip();
    if (!rest_.empty()) fail("header: text behind the closing brace");
    if (!seen[0] || !seen[1] || !seen[2]) fail("header: descr, fortran_order and shape are required");
    return out;
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    fail_format(file_, ": ", parts...);
  }
  void skip() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\n')) rest_.remove_prefix(1);
  }
  bool take(char c) {
    skip();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail("header: '", c, "' is missing before '", rest_.substr(0, 16), "'");
  }
  std::string_view quoted() {
    skip();
    const char quote = rest_.empty() ? '\0' : rest_.front();
    const auto end = quote == '\'' || quote == '"' ? rest_.find(quote, 1) : rest_.npos;
    if (end == rest_.npos) fail("header: a quoted text is missing before '", rest_.substr(0, 16), "'");
    const auto out = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return out;
  }
  bool dtype() {
    skip();
    if (!rest_.empty() && rest_.front() == '[') fail("descr: a structured dtype; f4 or f8 is required");
    const std::string_view d = quoted();
    if (d == "<f4" || d == "<f8") return d == "<f8";
    const auto safetensors = "; convert to f4, or write safetensors, which holds f16 and bf16";
    if (d == "<f2" || d == ">f2") fail("descr: '", d, "' is half precision, which npy is not read with", safetensors);
    if (d.find("bfloat16") != d.npos || d == "<V2" || d == "|V2")
      fail("descr: '", d, "' looks like bfloat16, which npy cannot express", safetensors);
    if (d == ">f4" || d == ">f8") fail("descr: '", d, "' is big endian; '<", d.substr(1), "' is required");
    fail("descr: '", d, "'; '<f4' or '<f8' is required");
  }
  bool boolean() {
    skip();
    for (const std::string_view word : {"True", "False"})
      if (rest_.substr(0, word.size()) == word) {
        rest_.remove_prefix(word.size());
        return word == "True";
      }
    fail("fortran_order: True or False is required before '", rest_.substr(0, 16), "'");
  }
  std::vector<std::size_t> tuple() {
    std::vector<std::size_t> out;
    expect('(');
    while (!take(')')) {
      skip();
      std::size_t n = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), n);
      if (error != std::errc{} || n > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()))
        fail("shape: a size from 0 to 2^63 - 1 is required before '", rest_.substr(0, 24), "'");
      rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
      out.push_back(n);
      if (take(')')) break;
      expect(',');
    }
    return out;
  }

  std::string_view rest_;
  const std::string& file_;
};

inline NpyHeader read_npy_header(const MappedFile& mapped, const std::string& file) {
  const auto bytes = mapped.bytes();
  constexpr std::string_view magic = "\x93NUMPY";
  if (bytes.size() < 10 || std::memcmp(bytes.data(), magic.data(), magic.size()) != 0)
    fail_format(file, ": is not an npy file: it does not begin with \\x93NUMPY, version and header length");
  const auto byte = [&](std::size_t i) { return std::to_integer<std::size_t>(bytes[i]); };
  const auto major = byte(6);
  if (major < 1 || major > 3) fail_format(file, ": version ", major, '.', byte(7), "; 1 to 3 are known");
  const std::size_t prefix = major == 1 ? 10 : 12;
  if (bytes.size() < prefix) fail_format(file, ": header length: truncated");
  const std::size_t length = byte(8) | byte(9) << 8 | (major == 1 ? 0 : byte(10) << 16 | byte(11) << 24);
  if (length > bytes.size() - prefix)
    fail_format(file, ": header length: ", length, " bytes, but only ", bytes.size() - prefix, " follow; truncated?");
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + prefix, length);
  NpyHeader out = NpyHeaderText(header, file).read();
  out.data = bytes.subspan(prefix + length);
  std::size_t size = out.f8 ? 8 : 4;
  bool overflow = false;
  for (const auto n : out.shape) overflow |= __builtin_mul_overflow(size, n, &size);
  if (overflow || size != out.data.size())
    fail_format(file, ": shape: needs ", overflow ? "more than 2^64" : std::to_string(size), " bytes of ",
                out.f8 ? "f8" : "f4", ", but ", out.data.size(), " follow the header");
  return out;
}

}  // namespace detail

// The array of an npy file of dtype f4 or f8 (little endian, either order), row-major, converted to T = float or double
// where the file holds the other. Throws format_error that names the file and the field.
template <class T = float>
xt::xarray<T> read_npy(const std::filesystem::path& path) {
  const std::string name = path.string();
  const MappedFile mapped(path);
  const auto header = detail::read_npy_header(mapped, name);
  const auto load = [&]<class U>(U) {
    std::vector<U> elements(header.data.size() / sizeof(U));  // the data need not be aligned in the file
    if (!elements.empty()) std::memcpy(elements.data(), header.data.data(), header.data.size());
    xt::xarray<T> out;
    if (header.fortran_order) out = xt::cast<T>(xt::adapt<xt::layout_type::column_major>(elements, header.shape));
    else out = xt::cast<T>(xt::adapt<xt::layout_type::row_major>(elements, header.shape));
    return out;
  };
  return header.f8 ? load(double{}) : load(float{});
}

// Writes an xtensor array as npy, whole or not at all. Throws std::system_error.
template <class X>
void write_npy(const std::filesystem::path& path, const X& array) {
  AtomicFile file(path);
  file.write(xt::dump_npy(array));
  file.commit();
}

// One layer recorded as npy files.
struct NpyLayer {
  std::filesystem::path keys, values;  // [kv_head][token][dim]
  std::filesystem::path queries;       // [q_head][window][dim] of the last prompt rows, post-RoPE; may be empty
};

// Layers recorded as npy files as a cache of float rows at positions 0, 1, ... without a continuation. Without queries
// there are as many query heads as KV heads. Throws format_error where files do not fit each other.
inline RecordedCache<float> read_npy_cache(const std::vector<NpyLayer>& layers) {
  struct Owned {
    std::vector<xt::xarray<float>> arrays;
    std::vector<index_t> positions;
  };
  auto owned = std::make_shared<Owned>();
  Recording<float> out;
  std::vector<std::size_t> first_k, first_v, first_q;
  const auto load = [&](const std::filesystem::path& path, std::vector<std::size_t>& first) {
    const auto& array = owned->arrays.emplace_back(read_npy<float>(path));
    const std::vector<std::size_t> shape(array.shape().begin(), array.shape().end());
    if (first.empty()) first = shape;
    bool fits = shape.size() == 3 && shape == first;
    for (const auto n : shape)
      fits = fits && n >= 1 && n <= static_cast<std::size_t>(std::numeric_limits<index_t>::max());
    if (!fits) fail_format(path.string(), ": shape: [head][token][dim], the same in every layer, is required");
    return array.data();
  };
  owned->arrays.reserve(3 * layers.size());
  for (const auto& layer : layers) {
    const float* k = load(layer.keys, first_k);
    const float* v = load(layer.values, first_v);
    if (first_k[0] != first_v[0] || first_k[1] != first_v[1])
      fail_format(layer.values.string(), ": shape: ", first_v[0], " heads of ", first_v[1], " tokens; the keys have ",
                  first_k[0], " of ", first_k[1]);
    if (layer.queries.empty() != layers.front().queries.empty())
      fail_argument("read_npy_cache: queries are required for every layer or for none");
    const float* q = layer.queries.empty() ? nullptr : load(layer.queries, first_q);
    if (q && (first_q[1] > first_k[1] || first_q[2] != first_k[2] || first_q[0] % first_k[0] != 0))
      fail_format(layer.queries.string(), ": shape: [", first_q[0], ", ", first_q[1], ", ", first_q[2],
                  "] does not fit keys of [", first_k[0], ", ", first_k[1], ", ", first_k[2], "]");
    out.layers.push_back({k, v, q});
  }
  if (layers.empty()) fail_argument("read_npy_cache: no layers");
  const auto count = [](std::size_t n) { return static_cast<index_t>(n); };
  out.shape = {count(layers.size()), count(first_k[0]), count(first_q.empty() ? first_k[0] : first_q[0]),
               count(first_k[2]), count(first_v[2])};
  out.prompt_len = count(first_k[1]);
  owned->positions.resize(first_k[1]);
  std::iota(owned->positions.begin(), owned->positions.end(), 0);
  out.positions = owned->positions;
  if (!first_q.empty()) out.q_positions = out.positions.last(first_q[1]);
  out.owner = std::move(owned);
  return RecordedCache<float>(std::move(out));
}

}  // namespace kvevict::inline KVEVICT_ABI
