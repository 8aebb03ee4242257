#include "cli/eval_state.hpp"

#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "kvevict/core/error.hpp"
#include "kvevict/io/atomic_file.hpp"
#include "kvevict/io/json.hpp"

namespace kvevict::tool {
namespace {

nlohmann::json as_json(const EvalCell& cell) {
  const ContextResult& r = cell.result;
  if (!cell.error.empty()) return {{"error", cell.error}, {"rows_full", r.rows_full}};
  return {r.probes,    r.probes_right, r.kl_answers, r.kl_continuation, r.nll_continuation, r.nll_continuation_full,
          r.rows_full, r.rows_kept,    r.rows_peak,  r.seconds};
}

EvalCell as_cell(const nlohmann::json& j) {
  EvalCell cell;
  ContextResult& r = cell.result;
  if (j.is_object()) {
    j.at("error").get_to(cell.error);
    j.at("rows_full").get_to(r.rows_full);
    return cell;
  }
  std::size_t i = 0;
  const auto next = [&](auto& value) { j.at(i++).get_to(value); };
  next(r.probes), next(r.probes_right), next(r.kl_answers), next(r.kl_continuation), next(r.nll_continuation);
  next(r.nll_continuation_full), next(r.rows_full), next(r.rows_kept), next(r.rows_peak), next(r.seconds);
  return cell;
}

}  // namespace

EvalState::EvalState(std::filesystem::path path, nlohmann::json run, std::size_t results_per_context)
    : path_(std::move(path)), run_(std::move(run)) {
  if (path_.empty()) return;
  lock_.emplace(path_);
  if (!std::filesystem::exists(path_)) return;
  const std::string where = path_.string();
  std::ifstream in(path_, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), {}};
  const nlohmann::json state = parse_json(content, where);
  try {
    if (state.at("format") != "kvevict-eval-state" || state.at("version") != 2)
      fail_format(where, ": is no kvevict-eval-state of version 2; name another file with --state");
    for (const auto& [field, value] : run_.items())
      if (state.at("run").value(field, nlohmann::json()) != value)
        fail_format(where, ": holds results of a run that differs in '", field,
                    "'; remove it to begin anew, or name another file with --state");
    for (const auto& [field, value] : state.at("run").items())
      if (!run_.contains(field))
        fail_format(where, ": holds results of a run that had '", field,
                    "', which this one has not; remove it to begin anew, or name another file with --state");
    for (const auto& entry : state.at("contexts")) {
      auto& results = done_[entry.at("context").get<index_t>()];
      for (const auto& r : entry.at("results")) results.push_back(as_cell(r));
      if (results.size() != results_per_context)
        fail_format(where, ": is damaged: ", results.size(), " results of a context; ", results_per_context,
                    " are required");
    }
  } catch (const nlohmann::json::exception& e) {
    fail_format(where, ": is damaged: ", e.what());
  }
}

const std::vector<EvalCell>* EvalState::find(index_t context) const {
  const auto found = done_.find(context);
  return found == done_.end() ? nullptr : &found->second;
}

void EvalState::add(index_t context, std::vector<EvalCell> results) {
  done_[context] = std::move(results);
  if (path_.empty()) return;
  auto contexts = nlohmann::json::array();
  for (const auto& [number, all] : done_) {
    auto list = nlohmann::json::array();
    for (const EvalCell& r : all) list.push_back(as_json(r));
    contexts.push_back({{"context", number}, {"results", list}});
  }
  AtomicFile file(path_);
  file.write(
      nlohmann::json{{"format", "kvevict-eval-state"}, {"version", 2}, {"run", run_}, {"contexts", contexts}}.dump());
  file.commit();
}

void EvalState::remove() const {
  if (!path_.empty()) std::filesystem::remove(path_);
}

}  // namespace kvevict::tool
