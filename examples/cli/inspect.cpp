// kvevict inspect: what a file holds. Files of this project's formats are validated whole.
#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "cli/commands.hpp"
#include "cli/table.hpp"
#include "kvevict/config.hpp"
#include "kvevict/core/printable.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/io/digest.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/plan_file.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/scores_file.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/lkv/checkpoint.hpp"

namespace kvevict::tool {
namespace {
#define KVEVICT_TOOL_TEXT(x) KVEVICT_TOOL_TEXT_OF(x)
#define KVEVICT_TOOL_TEXT_OF(x) #x
constexpr const char* abi_name = KVEVICT_TOOL_TEXT(KVEVICT_ABI);  // version, instruction set, vector path, threads
#undef KVEVICT_TOOL_TEXT
#undef KVEVICT_TOOL_TEXT_OF
}  // namespace

std::string version_text() {
  return joined_text("kvevict ", KVEVICT_VERSION_MAJOR, '.', KVEVICT_VERSION_MINOR, '.', KVEVICT_VERSION_PATCH, " (",
                     simd_target(), ", ", abi_name, ')');
}

namespace {

// Each reads its file whole, so that a broken one is refused, and says in words what it holds.
std::string describe_dump(const std::string& path) {
  return visit_dump(path, [](const auto& dump) {
    const auto& i = dump.info();
    return joined_text("model ", printable(i.model), ", ", i.shape.layers, " layers, ", i.shape.q_heads,
                       " query heads, ", i.shape.kv_heads, " KV heads, head dimension ", i.shape.head_dim_k, '\n',
                       i.prompt_len, " prompt rows, ", dump.cache().continuation_len(), " continuation rows, ",
                       dump.cache().prompt_query_positions().size(), " window queries\n");
  });
}

std::string describe_plan(const std::string& path) {
  const EvictionPlan plan = read_plan(path);
  std::string out =
      joined_text(printable(plan.specification), '\n', printable(plan.asked), ": ", plan.rows_kept(), " of ",
                  plan.granted.full, " rows kept in ", plan.layers, " layers of ", plan.heads, " heads\n");
  for (const auto& entry : plan.audit.entries()) out += "audit: " + printable(entry) + '\n';
  return out;
}

std::string describe_scores(const std::string& path) {
  const ScoresFile file(path);
  return joined_text(printable(file.spec()), '\n', file.layers(), " layers of ", file.layer(0).rows, " rows of ",
                     file.layer(0).cols, " scores\n");
}

std::string describe_tasks(const std::string& path) {
  const Tasks tasks(path);
  std::map<std::size_t, index_t> lengths;
  std::size_t probes = 0, answered = 0;
  for (index_t c = 0; c < tasks.contexts(); ++c) {
    ++lengths[tasks.context(c).size()];
    for (const Probe& p : tasks.probes(c)) {
      ++probes;
      answered += p.full == Probe::FullCache::answers;
    }
  }
  std::string out = joined_text("model ", printable(tasks.model()), ", ", tasks.contexts(), " contexts:");
  for (const auto& [length, count] : lengths) out += joined_text(' ', count, " of ", length, " tokens,");
  return out + joined_text(' ', probes, " probes, ", answered, " of them known to be answered by the full cache\n");
}

std::string describe_lkv(const std::string& path) {
  const LkvCheckpoint checkpoint(path);
  const LkvSizes& s = checkpoint.sizes();
  return joined_text("LKV for ", s.layers, " layers of ", s.kv_heads, " KV heads, keys of ", s.head_dim_k,
                     ", values of ", s.head_dim_v, '\n', "LKV-H: embeddings of ", s.head_width, ", hidden layer of ",
                     s.head_hidden, s.head_length ? ", slopes over the length\n" : "\n", "LKV-T: hidden layer of ",
                     s.token_hidden, ", keys ", print_value(s.input.key_frame), ", features ",
                     print_value(s.input.features), '\n');
}

std::string describe_training(const std::string& path) {
  const Safetensors file(path);
  const Metadata meta(file);
  meta.require_format("kvevict-lkv-training", "2");
  return joined_text("a training of LKV after ", meta.count("steps_done", 0), " steps, to go on with\n");
}

constexpr std::array<std::pair<std::string_view, std::string (*)(const std::string&)>, 6> describers{{
    {"kvevict-dump", describe_dump},
    {"kvevict-plan", describe_plan},
    {"kvevict-scores", describe_scores},
    {"kvevict-tasks", describe_tasks},
    {"kvevict-lkv", describe_lkv},
    {"kvevict-lkv-training", describe_training},
}};

}  // namespace

void inspect(const Common& common, const InspectOptions& options) {
  const Safetensors file(options.file);
  const auto format = file.metadata().find("format");
  const std::string kind = format == file.metadata().end() ? "safetensors without a format of ours" : format->second;
  std::string out = printable(options.file) + ": " + printable(kind) + ", " + file_digest(options.file) + '\n';
  for (const auto& [name, describe] : describers)
    if (name == kind) out += describe(options.file);
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
