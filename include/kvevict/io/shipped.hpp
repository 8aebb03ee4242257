// Files that ship with the library, by a name that means the same on every machine: `shipped:lkv-smollm2`.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI {

inline constexpr std::string_view shipped_prefix = "shipped:";

// The path behind a name of a file. `shipped:NAME` is NAME.safetensors in $KVEVICT_DATA, else in the first of `folders`
// that has it; every other text is a path already. Throws format_error that lists where was looked.
inline std::filesystem::path resolve_shipped(std::string_view text, std::span<const std::filesystem::path> folders) {
  if (!text.starts_with(shipped_prefix)) return text;
  const std::string file = std::string(text.substr(shipped_prefix.size())) + ".safetensors";
  std::vector<std::filesystem::path> places(folders.begin(), folders.end());
  if (const char* variable = std::getenv("KVEVICT_DATA"); variable && *variable)
    places.emplace(places.begin(), variable);
  std::string tried;
  for (const auto& folder : places) {
    std::error_code ignored;
    if (std::filesystem::exists(folder / file, ignored)) return folder / file;
    tried += (tried.empty() ? "" : ", ") + folder.string();
  }
  fail_format(text, ": ", file, " is not in ", tried.empty() ? "any folder that is known" : tried,
              "; set KVEVICT_DATA to the folder that holds it");
}

}  // namespace kvevict::inline KVEVICT_ABI
