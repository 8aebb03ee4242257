// Scores of all layers as a file: `kvevict-scores`, version 1 (docs/file-formats.md).
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Collects one matrix per layer, [head][token] (or [q_head][token] where a scorer does not reduce groups).
class ScoresWriter {
 public:
  // `spec`: the scorer's full specification; `dump`: what was scored.
  explicit ScoresWriter(std::string spec, std::string dump = "") : spec_(std::move(spec)), dump_(std::move(dump)) {}

  // Copies the next layer. Throws std::invalid_argument where its size is not that of the first.
  void add(Matrix<const float> scores) {
    if (layers_.empty()) {
      rows_ = scores.rows;
      cols_ = scores.cols;
    }
    if (scores.rows != rows_ || scores.cols != cols_)
      fail_argument("ScoresWriter: layer ", layers_.size(), " is [", scores.rows, ", ", scores.cols, "], layer 0 is [",
                    rows_, ", ", cols_, "]");
    auto& copy = layers_.emplace_back();
    for (index_t r = 0; r < scores.rows; ++r) copy.insert(copy.end(), scores.row(r), scores.row(r) + scores.cols);
  }

  // Throws std::system_error where the file cannot be written; then there is none.
  void write(const std::filesystem::path& path) const {
    SafetensorsWriter file;
    file.metadata("format", "kvevict-scores");
    file.metadata("version", "1");
    file.metadata("n_layers", std::to_string(layers_.size()));
    file.metadata("spec", spec_);
    file.metadata("dump", dump_);
    for (std::size_t l = 0; l < layers_.size(); ++l)
      file.add(joined_text("layers.", l, ".scores"), {rows_, cols_}, std::span<const float>(layers_[l]));
    file.write(path);
  }

 private:
  std::string spec_, dump_;
  index_t rows_ = 0, cols_ = 0;
  std::vector<std::vector<float>> layers_;
};

// Reads and validates; the scores stay in the mapped file.
class ScoresFile {
 public:
  // Throws format_error that names file and field, also for NaN.
  explicit ScoresFile(const std::filesystem::path& path) : file_(path) {
    const Metadata meta(file_);
    meta.require_format("kvevict-scores", "1");
    spec_ = meta.text_or("spec", "");
    const index_t layers = meta.count("n_layers", 1);
    for (index_t l = 0; l < layers; ++l) {
      const auto& tensor = file_.at(joined_text("layers.", l, ".scores"));
      if (l == 0) require_shape(tensor, {-1, -1});
      else require_shape(tensor, {layers_[0].rows, layers_[0].cols});
      for (const auto n : tensor.shape)
        if (n < 1 || n > std::numeric_limits<index_t>::max())
          fail_format(tensor.where, ": shape is ", detail::shape_text(tensor.shape), "; sizes from 1 on are required");
      const auto scores = tensor.as<float>();
      for (std::size_t i = 0; i < scores.size(); ++i)
        if (std::isnan(scores[i]))
          fail_format(tensor.where, ": row ", i / static_cast<std::size_t>(tensor.shape[1]), " column ",
                      i % static_cast<std::size_t>(tensor.shape[1]), " is NaN");
      const auto rows = static_cast<index_t>(tensor.shape[0]), cols = static_cast<index_t>(tensor.shape[1]);
      layers_.push_back({scores.data(), rows, cols, cols});
    }
    if (file_.tensors().size() != layers_.size())
      for (const auto& [name, tensor] : file_.tensors())
        if (!is_layer(name)) fail_format(tensor.where, ": is unknown in a kvevict-scores of ", layers, " layers");
  }

  const std::string& spec() const noexcept { return spec_; }
  index_t layers() const noexcept { return static_cast<index_t>(layers_.size()); }
  // [head][token]; valid while this object lives.
  Matrix<const float> layer(index_t l) const { return layers_[static_cast<std::size_t>(l)]; }

 private:
  bool is_layer(const std::string& name) const {
    for (std::size_t l = 0; l < layers_.size(); ++l)
      if (name == joined_text("layers.", l, ".scores")) return true;
    return false;
  }

  Safetensors file_;
  std::string spec_;
  std::vector<Matrix<const float>> layers_;
};

}  // namespace kvevict::inline KVEVICT_ABI
