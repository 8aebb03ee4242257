// Files that a command reads and writes: what must not be the same, what must be writable, and what was read.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "cli/options.hpp"

namespace kvevict::tool {

// An output that a command was given, with the flag that names it. An empty path is none.
struct Output {
  std::string flag, path;
};

// Before any work: no output is an input or another output, by whatever names, and each can be written, with room for
// `bytes`. Throws usage_error and std::system_error.
void check_outputs(const std::vector<Output>& outputs, const std::vector<std::string>& inputs,
                   std::int64_t bytes = 1 << 16);

// Every file in a folder, for a model.
std::vector<std::string> files_in(const std::string& folder);

// Files that policies read, by the texts that name them in the specifications, and the digests of their contents
// (io/digest.hpp).
std::map<std::string, std::string> policy_files(const std::vector<NamedPolicy>& policies);
// Where those files are.
std::vector<std::string> policy_paths(const std::vector<NamedPolicy>& policies);

// Throws usage_error unless a text that is to be stored is UTF-8.
void require_utf8(const std::string& flag, const std::string& text);

}  // namespace kvevict::tool
