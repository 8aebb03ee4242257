#include "cli/files.hpp"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "kvevict/core/printable.hpp"
#include "kvevict/io/atomic_file.hpp"
#include "kvevict/io/digest.hpp"
#include "kvevict/io/shipped.hpp"
#include "kvevict/naming/grammar.hpp"

namespace kvevict::tool {
namespace {

bool same_file(const std::string& a, const std::string& b) {
  std::error_code none;
  if (std::filesystem::equivalent(a, b, none)) return true;
  // Files that do not exist yet have no identity; their names do.
  const auto here = std::filesystem::weakly_canonical(a, none), there = std::filesystem::weakly_canonical(b, none);
  return !here.empty() && here == there;
}

// Texts in the arguments of a part, and of the parts in it, that name files.
void collect_files(const PartText& part, std::vector<std::string>& out) {
  for (const auto& [key, value] : part.args) {
    std::error_code none;
    if (value.starts_with(shipped_prefix) || std::filesystem::is_regular_file(value, none)) out.push_back(value);
  }
  if (part.base) collect_files(*part.base, out);
}

std::vector<std::string> file_texts(const std::vector<NamedPolicy>& policies) {
  std::vector<std::string> out;
  for (const NamedPolicy& p : policies) {
    const PolicyText text = parse_policy(p.policy.specification());
    collect_files(text.first, out);
    if (text.scorer) collect_files(*text.scorer, out);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace

void check_outputs(const std::vector<Output>& outputs, const std::vector<std::string>& inputs, std::int64_t bytes) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Output& o = outputs[i];
    if (o.path.empty()) continue;
    for (const std::string& input : inputs)
      if (!input.empty() && same_file(o.path, input))
        throw usage_error(o.flag + ' ' + o.path + ": is a file that this command reads (" + input +
                          "); name another file");
    for (std::size_t j = 0; j < i; ++j)
      if (!outputs[j].path.empty() && same_file(o.path, outputs[j].path))
        throw usage_error(o.flag + ' ' + o.path + " and " + outputs[j].flag + ' ' + outputs[j].path +
                          " are the same file; name two");
  }
  for (const Output& o : outputs)
    if (!o.path.empty()) AtomicFile(o.path).reserve(bytes);
}

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> out;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) out.push_back(entry.path().string());
  std::sort(out.begin(), out.end());
  return out;
}

std::map<std::string, std::string> policy_files(const std::vector<NamedPolicy>& policies) {
  std::map<std::string, std::string> out;
  for (const std::string& text : file_texts(policies)) out[text] = file_digest(resolve_shipped(text, data_folders()));
  return out;
}

std::vector<std::string> policy_paths(const std::vector<NamedPolicy>& policies) {
  std::vector<std::string> out;
  for (const std::string& text : file_texts(policies)) out.push_back(resolve_shipped(text, data_folders()).string());
  return out;
}

void require_utf8(const std::string& flag, const std::string& text) {
  if (!is_utf8(text)) throw usage_error(flag + ": '" + printable(text) + "' is not UTF-8, which files of ours hold");
}

}  // namespace kvevict::tool
