// Tasks: contexts, probes and continuations of a file that passes lie inside it and name contexts that there are.
#include "kvevict/io/tasks.hpp"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "common/task_file.hpp"
#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

std::vector<std::string> seeds() {
  const testing::TempDir folder;
  testing::TaskFile file;
  file.context({1, 2, 3}, {4, 5}).context({6, 7}, {8, 9}).probe(0, {1, 2}, {3}).probe(1, {4}, {5, 6}, -1, 1);
  file.write(folder / "tasks");
  return {testing::read_bytes(folder / "tasks")};
}

void run(std::string_view input) {
  const InputFile file(input);
  const Tasks tasks(file.path());
  double sum = static_cast<double>(tasks.model().size());
  for (index_t c = 0; c < tasks.contexts(); ++c) {
    if (tasks.context(c).empty() || tasks.continuation(c).size() < 2) std::abort();
    for (const index_t t : tasks.context(c)) sum += t;
    for (const index_t t : tasks.continuation(c)) sum += t;
    for (const Probe& p : tasks.probes(c)) {
      if (p.context != c || p.question.empty() || p.answer.empty()) std::abort();
      sum += static_cast<double>(tasks.kinds().at(static_cast<std::size_t>(p.kind)).size());
      for (const index_t t : p.question) sum += t;
      for (const index_t t : p.answer) sum += t;
    }
  }
  use(sum);
  tasks.check_vocabulary(10);
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate_safetensors};
  return t;
}

}  // namespace kvevict::fuzz
