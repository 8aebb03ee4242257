// What `eval` has finished so far, in a file, so that an interrupted run goes on where it stopped.
#pragma once
#include <cstddef>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "kvevict/model/evaluate.hpp"

namespace kvevict::tool {

// Results of whole contexts. With an empty path nothing is read or written.
class EvalState {
 public:
  // `run` says everything that results depend on. Reads what is there; a file of another run is a format_error that
  // names what differs.
  EvalState(std::filesystem::path path, nlohmann::json run, std::size_t results_per_context);

  const std::vector<ContextResult>* find(index_t context) const;
  // Keeps the results of a context: [policies * ratios].
  void add(index_t context, std::vector<ContextResult> results);
  // The run is over: removes the file.
  void remove() const;

 private:
  std::filesystem::path path_;
  nlohmann::json run_;
  std::map<index_t, std::vector<ContextResult>> done_;
};

}  // namespace kvevict::tool
