// What `eval` has finished so far, in a file, so that an interrupted run goes on where it stopped.
#pragma once
#include <cstddef>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kvevict/io/file_lock.hpp"
#include "kvevict/model/evaluate.hpp"

namespace kvevict::tool {

// One policy at one budget on one context, or why there is no result.
struct EvalCell {
  ContextResult result;
  std::string error;
};

// Results of whole contexts. With an empty path nothing is read or written. While it lives, no other process works on
// the same file.
class EvalState {
 public:
  // `run` says everything that results depend on. Reads what is there; a file of another run is a format_error that
  // names what differs.
  EvalState(std::filesystem::path path, nlohmann::json run, std::size_t results_per_context);

  const std::vector<EvalCell>* find(index_t context) const;
  // Keeps the results of a context: [budgets * policies].
  void add(index_t context, std::vector<EvalCell> results);
  // The run is over: removes the file.
  void remove() const;

 private:
  std::filesystem::path path_;
  nlohmann::json run_;
  std::optional<FileLock> lock_;
  std::map<index_t, std::vector<EvalCell>> done_;
};

}  // namespace kvevict::tool
