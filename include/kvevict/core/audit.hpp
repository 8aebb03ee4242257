// The notes of a plan: everything that was cut, raised or replaced, in plain sentences.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

class Audit {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    entries_.push_back(joined_text(parts...));
  }
  const std::vector<std::string>& entries() const& noexcept { return entries_; }
  std::vector<std::string> entries() && { return std::move(entries_); }

 private:
  std::vector<std::string> entries_;
};

}  // namespace kvevict::inline KVEVICT_ABI
