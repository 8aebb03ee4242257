// A folder of teachers (teacher.hpp), one safetensors file per context: made once, mapped by later runs, so that
// neither a second training nor one that resumes runs the model over its contexts again, and none of it needs to fit in
// memory. A file's name is a hash of everything that its contents depend on.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/core/splitmix64.hpp"
#include "kvevict/io/fields.hpp"
#include "kvevict/io/safetensors.hpp"
#include "kvevict/io/tasks.hpp"
#include "kvevict/train/teacher.hpp"

namespace kvevict::inline KVEVICT_ABI {

class TeacherFolder {
 public:
  // An empty path: teachers stay in memory. The folder is made where it does not exist. note: told about files that
  // were damaged and are made again.
  explicit TeacherFolder(std::filesystem::path folder = {}, std::function<void(const std::string&)> note = {})
      : folder_(std::move(folder)), note_(std::move(note)) {
    if (!folder_.empty()) std::filesystem::create_directories(folder_);
  }

  // From the folder, or made and put there; a file that cannot be read whole is made again.
  TeacherContext context(const host_exec& exec, LkvTeacher& teacher, const Tasks& tasks, index_t context,
                         index_t continuation) const {
    if (folder_.empty()) return teacher.context(exec, tasks, context, continuation);
    const auto path = folder_ / name(teacher, tasks, context, continuation);
    if (std::filesystem::exists(path)) {
      try {
        return read(path);
      } catch (const format_error& damaged) {
        if (note_) note_(joined_text(damaged.what(), "; it is made again"));
      }
    }
    write(path, teacher.context(exec, tasks, context, continuation));
    return read(path);
  }

 private:
  static std::string name(const LkvTeacher& teacher, const Tasks& tasks, index_t context, index_t continuation) {
    std::uint64_t hash = teacher.fingerprint() + static_cast<std::uint64_t>(continuation);
    const auto add = [&](std::uint64_t x) { hash = detail::splitmix64(hash ^ detail::splitmix64(x)); };
    const auto add_all = [&](std::span<const index_t> tokens) {
      add(tokens.size());
      for (const index_t t : tokens) add(static_cast<std::uint64_t>(t));
    };
    add_all(tasks.context(context));
    add_all(tasks.continuation(context));
    for (const Probe& p : tasks.probes(context)) {
      add_all(p.question);
      add_all(p.answer);
      add(static_cast<std::uint64_t>(static_cast<int>(p.full) + 1));
    }
    constexpr char digits[] = "0123456789abcdef";
    std::string out;
    for (int shift = 60; shift >= 0; shift -= 4) out += digits[hash >> shift & 15];
    return out + ".safetensors";
  }

  static void write(const std::filesystem::path& path, const TeacherContext& c) {
    SafetensorsWriter out;
    out.metadata("format", "kvevict-lkv-teacher");
    out.metadata("version", "1");
    std::vector<index_t> tokens, offsets{0}, first_scored;
    const auto add = [&](const TeacherText& t) {
      tokens.insert(tokens.end(), t.tokens.begin(), t.tokens.end());
      offsets.push_back(static_cast<index_t>(tokens.size()));
      first_scored.push_back(t.first_scored);
    };
    for (const TeacherText& t : c.probes) add(t);
    add(c.continuation);
    const auto tensor = [&](const char* what, auto values) { out.add(what, {std::ssize(values)}, values); };
    const std::vector<index_t> length{c.tokens};
    tensor("length", std::span<const index_t>(length));
    tensor("tokens", std::span<const index_t>(tokens));
    tensor("offsets", std::span<const index_t>(offsets));
    tensor("first_scored", std::span<const index_t>(first_scored));
    tensor("keys", c.keys);
    tensor("values", c.values);
    tensor("hidden", std::span<const float>(c.memory->hidden));
    out.write(path);
  }

  static TeacherContext read(const std::filesystem::path& path) {
    TeacherContext out;
    out.file = std::make_unique<Safetensors>(path);
    const Safetensors& file = *out.file;
    Metadata(file).require_format("kvevict-lkv-teacher", "1");
    require_shape(file.at("length"), {1});
    out.tokens = file.at("length").as<index_t>()[0];
    const auto tokens = file.at("tokens").as<index_t>(), offsets = file.at("offsets").as<index_t>(),
               first = file.at("first_scored").as<index_t>();
    if (first.empty() || offsets.size() != first.size() + 1 || offsets.front() != 0 ||
        offsets.back() != std::ssize(tokens) || !std::is_sorted(offsets.begin(), offsets.end()))
      fail_format(file.name(), ": texts do not fit together");
    for (std::size_t i = 0; i < first.size(); ++i) {
      TeacherText t;
      t.tokens.assign(tokens.begin() + offsets[i], tokens.begin() + offsets[i + 1]);
      t.first_scored = first[i];
      if (i + 1 < first.size()) out.probes.push_back(std::move(t));
      else out.continuation = std::move(t);
    }
    out.keys = file.at("keys").as<fp16_t>();
    out.values = file.at("values").as<fp16_t>();
    out.point_into(file.at("hidden").as<float>());
    return out;
  }

  std::filesystem::path folder_;
  std::function<void(const std::string&)> note_;
};

}  // namespace kvevict::inline KVEVICT_ABI
