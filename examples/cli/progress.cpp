#include "cli/progress.hpp"

#include <unistd.h>

#include <iostream>
#include <ostream>

#include "cli/table.hpp"
#include "kvevict/core/printable.hpp"

namespace kvevict::tool {

Progress::Progress(const Common& common, std::size_t steps) : steps_(steps) {
  if (!common.quiet && common.errors == &std::cerr && ::isatty(STDERR_FILENO)) err_ = common.errors;
}

void Progress::step(std::string_view what) {
  ++at_;
  if (!err_) return;
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
  const double left = spent.count() / static_cast<double>(at_) * static_cast<double>(steps_ - at_);
  *err_ << "\r\033[K" << at_ << '/' << steps_ << "  " << fixed(left, 0) << " s left  " << printable(what) << std::flush;
}

void Progress::done() {
  if (err_) *err_ << "\r\033[K" << std::flush;
}

}  // namespace kvevict::tool
