// Reader of recorded model runs: `kvevict-dump`, version 1 (docs/file-formats.md). Keys, values and queries stay in the
// mapped file; nothing is copied but small optional tensors of another type than an observation wants.
#pragma once
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "kvevict/cache/recorded.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/dump_info.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/observe/observation.hpp"
#include "kvevict/observe/observations.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {
inline constexpr std::array<std::string_view, 3> dump_rows{"k", "v", "q"};
inline constexpr std::array<std::string_view, 4> dump_extras{"attn_sum", "q_mean", "q_cov", "o_proj"};
inline constexpr std::array<std::string_view, 4> dump_shared{"q_positions", "token_ids", "positions", "rope_inv_freq"};

inline std::string layer_tensor(index_t layer, std::string_view kind) {
  return joined_text("layers.", layer, '.', kind);
}

// A validated dump whose element type is not chosen yet.
struct DumpFile {
  Safetensors file;
  DumpInfo info;
  DType dtype{};  // of k, v and q

  explicit DumpFile(const std::filesystem::path& path, ReadMode mode = ReadMode::map)
      : file(path, mode), info(read_dump_info(file)) {
    for (const auto& [name, tensor] : file.tensors()) check_name(name, tensor);
    const CacheShape& s = info.shape;
    const index_t d = s.head_dim_k, queries = static_cast<index_t>(info.q_positions.size());
    dtype = file.at("layers.0.k").dtype;
    require_float(file.at("layers.0.k"));
    for (index_t l = 0; l < s.layers; ++l) {
      for (const auto kind : dump_rows) {
        const auto& tensor = file.at(layer_tensor(l, kind));
        require_shape(tensor, {kind == "q" ? s.q_heads : s.kv_heads, kind == "q" ? queries : info.tokens(), d});
        if (tensor.dtype != dtype)
          fail_format(tensor.where, ": dtype is ", dtype_name(tensor.dtype), "; ", dtype_name(dtype),
                      " is required, as in layers.0.k");
      }
      check_extra(l, "attn_sum", {s.q_heads, info.prompt_len});
      check_extra(l, "q_mean", {s.q_heads, d});
      check_extra(l, "q_cov", {s.q_heads, d, d});
      check_extra(l, "o_proj", {-1, std::int64_t{s.q_heads} * d});
    }
  }

 private:
  void check_name(std::string_view name, const TensorView& tensor) const {
    for (const auto known : dump_shared)
      if (name == known) return;
    constexpr std::string_view prefix = "layers.";
    if (name.substr(0, prefix.size()) == prefix) {
      const std::string_view rest = name.substr(prefix.size());
      index_t layer = -1;
      const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), layer);
      const auto digits = static_cast<std::size_t>(end - rest.data());
      const bool number = error == std::errc{} && layer >= 0 && std::to_string(layer).size() == digits;
      if (number && digits < rest.size() && rest[digits] == '.') {
        const std::string_view kind = rest.substr(digits + 1);
        bool known = false;
        for (const auto k : dump_rows) known = known || kind == k;
        for (const auto k : dump_extras) known = known || kind == k;
        if (known && layer >= info.shape.layers)
          fail_format(tensor.where, ": layer ", layer, " does not exist; n_layers is ", info.shape.layers);
        if (known) return;
      }
    }
    fail_format(tensor.where, ": is unknown in a kvevict-dump");
  }

  void check_extra(index_t layer, std::string_view kind, std::initializer_list<std::int64_t> shape) const {
    const auto name = layer_tensor(layer, kind);
    if (!file.contains(name)) return;
    require_float(file.at(name));
    require_shape(file.at(name), shape);
  }
};
}  // namespace detail

// A recording with elements of type T. Copies are cheap and share the mapped file.
template <CacheElement T>
class Dump {
 public:
  // Throws format_error for a malformed file or one that holds another element type. A file that may be shortened by
  // somebody else meanwhile is to be read with ReadMode::copy: the loss of a mapped page ends the process.
  explicit Dump(const std::filesystem::path& path, ReadMode mode = ReadMode::map)
      : Dump(std::make_shared<const detail::DumpFile>(path, mode)) {}
  explicit Dump(std::shared_ptr<const detail::DumpFile> file) : file_(std::move(file)), cache_(recording(file_)) {}

  // A temporary gives copies: it may be the last that holds the file.
  const std::string& name() const& noexcept { return file_->file.name(); }  // the path, as given
  std::string name() const&& { return file_->file.name(); }
  const DumpInfo& info() const& noexcept { return file_->info; }
  DumpInfo info() const&& { return file_->info; }
  const RecordedCache<T>& cache() const& noexcept { return cache_; }
  RecordedCache<T> cache() const&& { return cache_; }
  // attn_sum, q_mean, q_cov or o_proj of a layer; null where it was not recorded.
  const TensorView* extra(index_t layer, std::string_view kind) const& {
    const auto& tensors = file_->file.tensors();
    const auto found = tensors.find(detail::layer_tensor(layer, kind));
    return found == tensors.end() ? nullptr : &found->second;
  }
  const TensorView* extra(index_t, std::string_view) const&& = delete;

 private:
  static Recording<T> recording(const std::shared_ptr<const detail::DumpFile>& file) {
    const DumpInfo& info = file->info;
    Recording<T> out{info.shape, info.prompt_len, info.positions, info.q_positions, {}, file};
    for (index_t l = 0; l < info.shape.layers; ++l) {
      const auto rows = [&](std::string_view kind) {
        return file->file.at(detail::layer_tensor(l, kind)).template as<T>().data();
      };
      out.layers.push_back({rows("k"), rows("v"), rows("q")});
    }
    return out;
  }

  std::shared_ptr<const detail::DumpFile> file_;
  RecordedCache<T> cache_;
};

// f(const Dump<T>&) with the element type that the file holds; returns what f returns. Throws format_error.
template <class F>
decltype(auto) visit_dump(const std::filesystem::path& path, F&& f, ReadMode mode = ReadMode::map) {
  auto file = std::make_shared<const detail::DumpFile>(path, mode);
  switch (file->dtype) {
    case DType::f32:
      return f(Dump<float>(std::move(file)));
    case DType::f16:
      return f(Dump<fp16_t>(std::move(file)));
    default:  // the only other type that a DumpFile lets pass
      return f(Dump<bf16_t>(std::move(file)));
  }
}

// One layer of a dump for a scorer: all recorded prompt queries as its window, every extra that the file holds, and the
// continuation's queries as future_queries. The result shares the file; it stays valid on its own.
template <CacheElement T>
[[nodiscard]] OwnedObservation<T> observe_layer(const Dump<T>& dump, index_t layer) {
  const DumpInfo& info = dump.info();
  const RecordedCache<T>& cache = dump.cache();
  if (layer < 0 || layer >= info.shape.layers)
    fail_argument("observe_layer: layer ", layer, "; 0 to ", info.shape.layers - 1, " are in ", dump.name());
  OwnedObservation<T> out = observe_layer(cache, layer, info.softmax_scale);
  out.rope = info.rope();
  out.window_positions = cache.prompt_query_positions();
  for (index_t h = 0; h < info.shape.q_heads; ++h) {
    if (!cache.prompt_query_positions().empty()) out.window_queries.push_back(cache.prompt_queries(layer, h));
    if (cache.continuation_len() != 0) out.future_queries.push_back(cache.continuation_queries(layer, h));
  }

  // Tensors of the wanted type are shown where they are, others are converted once.
  struct Owned {
    RecordedCache<T> cache;
    std::vector<std::vector<float>> floats;
    std::vector<T> o_proj;
  };
  auto owned = std::make_shared<Owned>(Owned{cache, {}, {}});
  const auto floats = [&](std::string_view kind) -> const float* {
    const TensorView* tensor = dump.extra(layer, kind);
    if (!tensor) return nullptr;
    if (tensor->dtype == DType::f32) return tensor->template as<float>().data();
    return owned->floats.emplace_back(converted<float>(*tensor)).data();
  };
  const index_t d = info.shape.head_dim_k;
  if (const float* x = floats("attn_sum")) out.attn_sum.push_back(dense_rows(x, info.shape.q_heads, info.prompt_len));
  if (const float* x = floats("q_mean")) out.q_mean.push_back(dense_rows(x, info.shape.q_heads, d));
  if (const float* x = floats("q_cov"))
    for (index_t h = 0; h < info.shape.q_heads; ++h)
      out.q_cov.push_back(dense_rows(x + std::ptrdiff_t{h} * d * d, d, d));
  out.q_stats_first = info.q_stats_first;
  if (const TensorView* tensor = dump.extra(layer, "o_proj")) {
    if (tensor->dtype != dtype_of<T>()) owned->o_proj = converted<T>(*tensor);
    const T* data = tensor->dtype == dtype_of<T>() ? tensor->template as<T>().data() : owned->o_proj.data();
    out.o_proj = dense_rows(data, tensor->shape[0], static_cast<index_t>(tensor->shape[1]));
  }
  out.owner = std::move(owned);
  return out;
}

// Every layer of a dump. Shares the file; stays valid on its own.
template <CacheElement T>
[[nodiscard]] Observations<T> observe_all(const Dump<T>& dump) {
  std::vector<OwnedObservation<T>> layers;
  for (index_t l = 0; l < dump.info().shape.layers; ++l) layers.push_back(observe_layer(dump, l));
  return Observations<T>(std::move(layers));
}

}  // namespace kvevict::inline KVEVICT_ABI
