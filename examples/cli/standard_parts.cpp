// The one translation unit with every part behind its erased interface.
#include "kvevict/policy/standard_parts.hpp"

#include "cli/tool.hpp"

namespace kvevict::tool {

Registry standard_parts() { return standard_registry(); }

}  // namespace kvevict::tool
