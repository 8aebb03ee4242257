// The one translation unit with every part behind its erased interface.
#include "kvevict/naming/standard_parts.hpp"

#include "cli/options.hpp"
#include "cli/tool.hpp"

namespace kvevict::tool {

Registry standard_parts() {
  return standard_registry({find_shipped("lkv-smollm2.safetensors"), find_shipped("lkv-paper-smollm2.safetensors")});
}

}  // namespace kvevict::tool
