// The file that the LKV parts take their weights from.
#pragma once
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/io/shipped.hpp"

namespace kvevict::inline KVEVICT_ABI {

class LkvCheckpoint;  // lkv/checkpoint.hpp

// The parameter `file` of both LKV parts: a path or `shipped:NAME`, and the checkpoint behind it, read at first use and
// shared by all copies. Safe to use from several threads. Who reads it includes lkv/checkpoint.hpp; naming it needs no
// reader.
class LkvFile {
 public:
  LkvFile() = default;
  // data_folders: where shipped files lie, after $KVEVICT_DATA (io/shipped.hpp).
  explicit LkvFile(std::string path, std::vector<std::filesystem::path> data_folders = {})
      : path_(std::move(path)), folders_(std::move(data_folders)), slot_(std::make_shared<Slot>()) {}

  const std::string& path() const noexcept { return path_; }  // as given
  // Throws std::invalid_argument naming `who` where no file was given, format_error where it cannot be found or read.
  template <class Checkpoint = LkvCheckpoint>
  const Checkpoint& checkpoint(std::string_view who) const {
    if (path_.empty())
      fail_argument(who, ": no weights; file=\"PATH\" must name a checkpoint made by `kvevict train lkv`");
    std::call_once(slot_->once, [this] {
      slot_->checkpoint = std::make_shared<const Checkpoint>(resolve_shipped(path_, folders_));
    });
    return *slot_->checkpoint;
  }

  friend std::string print_value(const LkvFile& file) { return kvevict::print_value(file.path_); }
  friend bool parse_value(std::string_view text, LkvFile& file) {
    std::string path;
    if (!kvevict::parse_value(text, path)) return false;
    if (path != file.path_) file = LkvFile(path, file.folders_);
    return true;
  }

 private:
  struct Slot {
    std::once_flag once;
    std::shared_ptr<const LkvCheckpoint> checkpoint;
  };
  std::string path_;
  std::vector<std::filesystem::path> folders_;
  std::shared_ptr<Slot> slot_;
};

}  // namespace kvevict::inline KVEVICT_ABI
