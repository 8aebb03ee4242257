// The safetensors format: 8 bytes of length (little endian), a JSON header, raw tensors (row-major, little endian).
// https://github.com/huggingface/safetensors. Reading maps the file and validates all of it, used or not, so that no
// later access can leave it; writing gives a whole file or none.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/io/atomic_file.hpp"
#include "kvevict/io/dtype.hpp"
#include "kvevict/io/json.hpp"
#include "kvevict/io/mapped_file.hpp"

namespace kvevict::inline KVEVICT_ABI {

static_assert(std::endian::native == std::endian::little, "tensors in files are little endian");

namespace detail {
inline std::string shape_text(std::span<const std::int64_t> shape) {
  std::string out = "[";
  for (const auto n : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(n);
  return out + ']';
}
}  // namespace detail

// One tensor of a file.
struct TensorView {
  DType dtype{};
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
  std::string where;  // "FILE: tensor 'NAME'", for messages

  std::size_t size() const noexcept { return bytes.size() / dtype_bytes(dtype); }
  // The elements. Throws format_error where the file holds another type.
  template <class T>
  std::span<const T> as() const {
    if (dtype != dtype_of<T>())
      fail_format(where, ": dtype is ", dtype_name(dtype), "; ", dtype_name(dtype_of<T>()), " is required");
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(T) != 0)
      fail_format(where, ": is not aligned to ", alignof(T), " bytes");
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

class Safetensors {
 public:
  using Tensors = std::map<std::string, TensorView, std::less<>>;
  static constexpr std::uint64_t most_header_bytes = 100'000'000;  // the limit of the reference implementation

  // Maps (or reads, for files that may change meanwhile) and validates `path`. Throws format_error that names the file
  // and the field.
  explicit Safetensors(const std::filesystem::path& path, ReadMode mode = ReadMode::map)
      : name_(path.string()), file_(path, mode) {
    const auto bytes = file_.bytes();
    if (bytes.size() < 8)
      fail_format(name_, ": header length: the file has ", bytes.size(), " bytes; at least 8 are required");
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    if (length > bytes.size() - 8)
      fail_format(name_, ": header length: ", length, " bytes, but only ", bytes.size() - 8, " follow; truncated?");
    if (length > most_header_bytes)
      fail_format(name_, ": header length: ", length, " bytes; at most ", most_header_bytes, " are allowed");
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, static_cast<std::size_t>(length));
    if (text.empty() || text.front() != '{') fail_format(name_, ": header: does not begin with '{'");
    read_header(parse_json(text, name_ + ": header", 3), bytes.subspan(8 + text.size()));
  }

  const std::string& name() const& noexcept { return name_; }  // the path, as given
  const std::map<std::string, std::string>& metadata() const& noexcept { return metadata_; }
  const Tensors& tensors() const& noexcept { return tensors_; }
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  // Throws format_error where the file holds no such tensor.
  const TensorView& at(std::string_view name) const& {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail_format(name_, ": tensor '", name, "' is missing");
    return found->second;
  }

  // No views of a temporary: it unmaps the file.
  const std::string& name() const&& = delete;
  const std::map<std::string, std::string>& metadata() const&& = delete;
  const Tensors& tensors() const&& = delete;
  const TensorView& at(std::string_view) const&& = delete;

 private:
  void read_header(const nlohmann::json& header, std::span<const std::byte> data) {
    std::vector<std::pair<std::pair<std::uint64_t, std::uint64_t>, const std::string*>> ranges;
    for (const auto& [key, value] : header.items()) {
      if (key == "__metadata__") {
        read_metadata(value);
        continue;
      }
      const auto range = read_tensor(key, value, data);
      ranges.emplace_back(range, &tensors_.find(key)->first);
    }
    std::sort(ranges.begin(), ranges.end());
    std::uint64_t end = 0;
    for (const auto& [range, name] : ranges) {
      if (range.first != end)
        fail_format(name_, ": tensor '", *name, "': data_offsets [", range.first, ", ", range.second, "] ",
                    range.first < end ? "overlap the tensor before" : "leave a gap", "; ", end,
                    " is the next free byte");
      end = range.second;
    }
    if (end != data.size())
      fail_format(name_, ": data: the tensors end at byte ", end, ", the file at ", data.size(), " of the data");
  }

  void read_metadata(const nlohmann::json& value) {
    if (!value.is_object()) fail_format(name_, ": __metadata__: is not an object");
    for (const auto& [key, entry] : value.items()) {
      if (!entry.is_string()) fail_format(name_, ": metadata '", key, "': is not a string");
      metadata_[key] = entry.get<std::string>();
    }
  }

  std::pair<std::uint64_t, std::uint64_t> read_tensor(const std::string& name, const nlohmann::json& value,
                                                      std::span<const std::byte> data) {
    TensorView tensor;
    tensor.where = name_ + ": tensor '" + name + "'";
    const auto& where = tensor.where;
    if (!value.is_object()) fail_format(where, ": is not an object with dtype, shape and data_offsets");
    for (const auto& [key, entry] : value.items())
      if (key != "dtype" && key != "shape" && key != "data_offsets") fail_format(where, ": unknown field '", key, "'");
    for (const char* key : {"dtype", "shape", "data_offsets"})
      if (!value.contains(key)) fail_format(where, ": ", key, " is missing");

    const auto& dtype = value["dtype"];
    const auto known = dtype.is_string() ? dtype_named(dtype.get_ref<const std::string&>()) : std::nullopt;
    if (!known) fail_format(where, ": dtype ", dtype.dump(), " is unknown");
    tensor.dtype = *known;

    std::uint64_t size = dtype_bytes(tensor.dtype);
    bool overflow = false;
    if (!value["shape"].is_array()) fail_format(where, ": shape is not a list");
    for (const auto& dim : value["shape"]) {
      if (!dim.is_number_unsigned() || dim.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max())
        fail_format(where, ": shape ", value["shape"].dump(), ": ", dim.dump(), " is not a size from 0 to 2^63 - 1");
      tensor.shape.push_back(dim.get<std::int64_t>());
      overflow |= __builtin_mul_overflow(size, dim.get<std::uint64_t>(), &size);
    }
    if (overflow) fail_format(where, ": shape ", value["shape"].dump(), " has more than 2^64 bytes");

    const auto& offsets = value["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned())
      fail_format(where, ": data_offsets ", offsets.dump(), ": two byte counts [begin, end] are required");
    const auto begin = offsets[0].get<std::uint64_t>(), end = offsets[1].get<std::uint64_t>();
    if (begin > end || end > data.size())
      fail_format(where, ": data_offsets [", begin, ", ", end, "] leave the data, which has ", data.size(),
                  " bytes; truncated?");
    if (end - begin != size)
      fail_format(where, ": data_offsets [", begin, ", ", end, "] hold ", end - begin, " bytes, but shape ",
                  detail::shape_text(tensor.shape), " of ", dtype_name(tensor.dtype), " needs ", size);

    tensor.bytes = aligned(data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
                           dtype_bytes(tensor.dtype));
    tensors_.emplace(name, std::move(tensor));
    return {begin, end};
  }

  // The format does not promise alignment. Usual writers give it; what lies elsewhere is copied once.
  std::span<const std::byte> aligned(std::span<const std::byte> bytes, std::size_t alignment) {
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0) return bytes;
    auto& copy = copies_.emplace_back(new std::byte[bytes.size()]);
    std::memcpy(copy.get(), bytes.data(), bytes.size());
    return {copy.get(), bytes.size()};
  }

  std::string name_;
  MappedFile file_;
  std::map<std::string, std::string> metadata_;
  Tensors tensors_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

// Collects tensors and writes them. The bytes are borrowed: they must stay as they are until write() returns.
class SafetensorsWriter {
 public:
  void metadata(std::string key, std::string value) { metadata_.insert_or_assign(std::move(key), std::move(value)); }

  // Throws std::invalid_argument where the shape does not fit the bytes or the name is taken.
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape, std::span<const std::byte> bytes) {
    std::uint64_t size = dtype_bytes(dtype);
    bool bad = false;
    for (const auto n : shape) bad |= n < 0 || __builtin_mul_overflow(size, static_cast<std::uint64_t>(n), &size);
    if (bad || size != bytes.size())
      fail_argument("SafetensorsWriter: tensor '", name, "': shape ", detail::shape_text(shape), " of ",
                    dtype_name(dtype), " does not fit ", bytes.size(), " bytes");
    if (name == "__metadata__") fail_argument("SafetensorsWriter: '__metadata__' cannot name a tensor");
    if (!tensors_.try_emplace(name, Entry{dtype, std::move(shape), bytes}).second)
      fail_argument("SafetensorsWriter: tensor '", name, "' was added before");
  }
  template <class T>
  void add(const std::string& name, std::vector<std::int64_t> shape, std::span<const T> elements) {
    add(name, dtype_of<T>(), std::move(shape), std::as_bytes(elements));
  }

  // Writes under a temporary name and renames. The same content gives the same bytes. Throws std::system_error.
  void write(const std::filesystem::path& path) const {
    // Large elements first, then by name: so every tensor is aligned, as the reference implementation does it.
    std::vector<const std::pair<const std::string, Entry>*> order;
    for (const auto& entry : tensors_) order.push_back(&entry);
    std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
      return dtype_bytes(a->second.dtype) > dtype_bytes(b->second.dtype);
    });
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!metadata_.empty()) header["__metadata__"] = metadata_;
    std::uint64_t end = 0;
    for (const auto* entry : order) {
      const auto& [dtype, shape, bytes] = entry->second;
      header[entry->first] = {
          {"dtype", std::string(dtype_name(dtype))}, {"shape", shape}, {"data_offsets", {end, end + bytes.size()}}};
      end += bytes.size();
    }
    std::string text;
    try {
      text = header.dump();
    } catch (const nlohmann::json::exception& e) {
      fail_argument("SafetensorsWriter: a name or a metadata text is not UTF-8: ", e.what());
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const std::uint64_t length = text.size();

    AtomicFile file(path);
    file.write(std::as_bytes(std::span(&length, 1)));
    file.write(text);
    for (const auto* entry : order) file.write(entry->second.bytes);
    file.commit();
  }

 private:
  struct Entry {
    DType dtype;
    std::vector<std::int64_t> shape;
    std::span<const std::byte> bytes;
  };
  std::map<std::string, std::string> metadata_;
  std::map<std::string, Entry> tensors_;
};

}  // namespace kvevict::inline KVEVICT_ABI
