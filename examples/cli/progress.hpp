// One line of progress with the remaining time on standard error, where that is a terminal.
#pragma once
#include <chrono>
#include <cstddef>
#include <string_view>

#include "cli/options.hpp"

namespace kvevict::tool {

class Progress {
 public:
  Progress(const Common& common, std::size_t steps);
  // One step is done; `what` it was.
  void step(std::string_view what);
  // Clears the line.
  void done();

 private:
  std::ostream* err_ = nullptr;  // null: silent
  std::size_t steps_, at_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace kvevict::tool
