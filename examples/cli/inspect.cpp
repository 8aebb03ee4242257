// kvevict inspect: what a file holds. Files of this project's formats are validated whole.
#include <string>

#include "cli/commands.hpp"
#include "cli/table.hpp"
#include "kvevict/config.hpp"
#include "kvevict/core/simd.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/plan_file.hpp"
#include "kvevict/io/safetensors.hpp"

namespace kvevict::tool {

std::string version_text() {
  return text("kvevict ", KVEVICT_VERSION_MAJOR, '.', KVEVICT_VERSION_MINOR, '.', KVEVICT_VERSION_PATCH, " (",
              simd_target(), ')');
}

void inspect(const Common& common, const InspectOptions& options) {
  const Safetensors file(options.file);
  const auto format = file.metadata().find("format");
  const std::string kind = format == file.metadata().end() ? "safetensors without a format of ours" : format->second;
  std::string out = options.file + ": " + kind + '\n';
  if (kind == "kvevict-dump") {
    visit_dump(options.file, [&](const auto& dump) {
      const auto& i = dump.info();
      out += text("model ", i.model, ", ", i.shape.layers, " layers, ", i.shape.q_heads, " query heads, ",
                  i.shape.kv_heads, " KV heads, head dimension ", i.shape.head_dim_k, '\n', i.prompt_len,
                  " prompt rows, ", dump.cache().continuation_len(), " continuation rows, ",
                  dump.cache().prompt_query_positions().size(), " window queries\n");
    });
  } else if (kind == "kvevict-plan") {
    const EvictionPlan plan = read_plan(options.file);
    out += text(plan.specification, '\n', plan.asked, ": ", plan.rows_kept(), " of ", plan.granted.full,
                " rows kept in ", plan.layers, " layers of ", plan.heads, " heads\n");
    for (const auto& entry : plan.audit.entries()) out += "audit: " + entry + '\n';
  }
  Table metadata({{"metadata", false}, {"value", false}});
  for (const auto& [key, value] : file.metadata()) metadata.add({key, value});
  out += metadata.str();
  Table tensors({{"tensor", false}, {"type", false}, {"shape", false}, {"bytes", true}});
  for (const auto& [name, tensor] : file.tensors())
    tensors.add({name, std::string(dtype_name(tensor.dtype)), detail::shape_text(tensor.shape),
                 std::to_string(tensor.bytes.size())});
  out += tensors.str();
  deliver(common, out);
}

}  // namespace kvevict::tool
