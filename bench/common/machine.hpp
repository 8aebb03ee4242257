// What a benchmark has to say about the machine it ran on.
#pragma once
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>
#if __has_include(<Eigen/Core>)
#include <Eigen/Core>
#endif

#include "kvevict/cpu/simd.hpp"

namespace kvevict::bench {

// The processor's name as the system gives it, or "unknown".
inline std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const auto colon = line.find(':');
    if (line.starts_with("model name") && colon != std::string::npos && colon + 2 <= line.size())
      return line.substr(colon + 2);
  }
  return "unknown";
}

// Key and value of each line that goes into the report.
inline std::vector<std::pair<std::string, std::string>> machine() {
  std::vector<std::pair<std::string, std::string>> lines;
  lines.emplace_back("cpu", cpu_model());
  lines.emplace_back("kvevict_simd", simd_target());
#if defined(EIGEN_WORLD_VERSION)
  lines.emplace_back("eigen_simd", Eigen::SimdInstructionSetsInUse());
#endif
#if defined(KVEVICT_COMPILER)
  lines.emplace_back("compiler", KVEVICT_COMPILER);
#elif defined(__clang__)
  lines.emplace_back("compiler", "Clang " __clang_version__);
#else
  lines.emplace_back("compiler", "GNU " __VERSION__);
#endif
#if defined(KVEVICT_FLAGS)
  lines.emplace_back("flags", KVEVICT_FLAGS);
#endif
  lines.emplace_back("processors", std::to_string(std::thread::hardware_concurrency()));
  lines.emplace_back("threads", "1 unless the name says otherwise");
  return lines;
}

}  // namespace kvevict::bench
