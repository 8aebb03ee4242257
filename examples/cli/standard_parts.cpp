// The one translation unit with every part behind its erased interface.
#include "kvevict/naming/standard_parts.hpp"

#include <string>

#include "cli/options.hpp"
#include "cli/tool.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/io/shipped.hpp"

namespace kvevict::tool {

Registry standard_parts() {
  const auto shipped = [](const char* name) -> std::string {
    try {
      const std::string text = std::string(shipped_prefix) + name;
      (void)resolve_shipped(text, data_folders());
      return text;
    } catch (const format_error&) {
      return "";  // a tool without its data has no such preset
    }
  };
  return standard_registry({shipped("lkv-smollm2"), shipped("lkv-paper-smollm2"), data_folders()});
}

}  // namespace kvevict::tool
