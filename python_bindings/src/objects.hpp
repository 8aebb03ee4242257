// The classes of the Python module that several units know, and what binds each.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "arrays.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/metrics/metrics.hpp"
#include "kvevict/plan/plan.hpp"
#include "kvevict/rope/rope.hpp"

namespace kvevict::inline KVEVICT_ABI {
class AnyScorer;
}

namespace kvevict::inline KVEVICT_ABI::python {

// kvevict.Plan. Never changed, so that views of it stay valid.
struct PyPlan {
  std::shared_ptr<const EvictionPlan> plan;
};
inline PyPlan own(EvictionPlan plan) { return {std::make_shared<const EvictionPlan>(std::move(plan))}; }

// kvevict.Rope.
struct PyRope {
  RopeStyle style = RopeStyle::half;
  std::vector<float> inv_freq;
  float attention_factor = 1.f;
  Rope view() const { return {style, static_cast<index_t>(2 * inv_freq.size()), inv_freq, attention_factor}; }
};

// kvevict.Recording.
struct PyRecording {
  std::string path;
  std::variant<Dump<float>, Dump<fp16_t>, Dump<bf16_t>> dump;
  std::vector<LayerTruth> truth;  // what metrics measure against, computed when first asked for

  const DumpInfo& info() const {
    return std::visit([](const auto& d) -> const DumpInfo& { return d.info(); }, dump);
  }
};

// kvevict.RaggedCache. Views of its rows are counted: rows move when a plan is applied.
struct CacheState {
  std::variant<RaggedCache<float>, RaggedCache<fp16_t>, RaggedCache<bf16_t>> cache;
  std::atomic<int> views{0};
  std::atomic<bool> busy{false};
};
struct PyCache {
  std::shared_ptr<CacheState> state;
};

// One caller at a time for an object whose work runs without the interpreter's lock.
class Turn {
 public:
  Turn(std::atomic<bool>& busy, const char* who) : busy_(busy) {
    if (busy_.exchange(true)) fail_argument(who, ": another thread works with this object; one at a time");
  }
  ~Turn() { busy_ = false; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& busy_;
};

void bind_plans(nb::module_& m);
void bind_scorers(nb::module_& m);
void bind_policies(nb::module_& m);
void bind_recordings(nb::module_& m);
void bind_caches(nb::module_& m);

// Reads a budget and a number of threads from keyword arguments. Throws ValueError unless exactly one is given.
Budget read_budget(std::optional<double> retain, std::optional<std::int64_t> rows, std::optional<std::int64_t> bytes);
host_exec read_threads(int threads);

// A scorer written in Python, as a part of a policy (naming/any.hpp).
AnyScorer python_scorer(nb::object scorer);
// What the views that such a scorer is shown keep alive, for the calls of this thread while it lives.
class ShownTo {
 public:
  explicit ShownTo(nb::handle owner);
  ~ShownTo();
  ShownTo(const ShownTo&) = delete;
  ShownTo& operator=(const ShownTo&) = delete;

 private:
  nb::handle before_;
};

}  // namespace kvevict::inline KVEVICT_ABI::python
