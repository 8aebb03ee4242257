// kvevict.Plan and what budgets and threads are read from.
#include <nanobind/stl/filesystem.h>

#include "kvevict/core/budget.hpp"
#include "kvevict/io/plan_file.hpp"
#include "objects.hpp"

namespace kvevict::inline KVEVICT_ABI::python {

Budget read_budget(std::optional<double> retain, std::optional<std::int64_t> rows, std::optional<std::int64_t> bytes) {
  if (retain.has_value() + rows.has_value() + bytes.has_value() != 1)
    fail_argument("budget: exactly one of retain, rows and bytes is required");
  if (retain) return Budget::retain(*retain);
  return rows ? Budget::rows(*rows) : Budget::bytes(*bytes);
}

host_exec read_threads(int threads) {
  if (threads < 1) fail_argument("threads: ", threads, "; at least 1 is required");
  return {threads};
}

namespace {

nb::object all_rows(const PyPlan& p, index_t layer, index_t head) {
  const auto rows = p.plan->head(layer, head);
  return number_view(rows.data(), rows.size(), keeper(p.plan));
}

// Kept rows that somebody else chose, [layers][heads] of ascending row numbers.
PyPlan from_rows(const nb::sequence& layers, std::string specification) {
  EvictionPlan plan;
  plan.specification = std::move(specification);
  plan.asked = "rows as given";
  plan.offsets.push_back(0);
  for (const nb::handle layer : layers) {
    const nb::object list = nb::borrow(layer);
    const auto heads = static_cast<index_t>(nb::len(list));
    if (plan.layers == 0) plan.heads = heads;
    if (heads != plan.heads || heads == 0)
      fail_argument("Plan.from_rows: layer ", plan.layers, " has ", heads, " heads; ",
                    plan.heads == 0 ? index_t{1} : plan.heads, " are required");
    for (index_t h = 0; h < heads; ++h) {
      const std::string name = joined_text("Plan.from_rows: layer ", plan.layers, ", head ", h);
      index_t before = -1;
      for (const index_t row : read_numbers(name, nb::object(list[h]))) {
        if (row <= before) fail_argument(name, ": row ", row, " after ", before, "; rows must ascend");
        plan.indices.push_back(before = row);
      }
      plan.offsets.push_back(std::ssize(plan.indices));
    }
    ++plan.layers;
  }
  if (plan.layers == 0) fail_argument("Plan.from_rows: no layers");
  plan.granted.total = plan.rows_kept();
  return own(std::move(plan));
}

}  // namespace

void bind_plans(nb::module_& m) {
  nb::class_<PyPlan>(m, "Plan", "Which rows of every (layer, head) stay. Arrays are views that keep the plan alive.")
      .def_static(
          "load", [](const std::filesystem::path& path) { return own(read_plan(path)); }, nb::arg("path"))
      .def_static("from_rows", &from_rows, nb::arg("rows"), nb::arg("specification") = "given")
      .def(
          "save",
          [](const PyPlan& p, const std::filesystem::path& path, const std::string& recording) {
            write_plan(path, *p.plan, recording);
          },
          nb::arg("path"), nb::arg("recording") = "")
      .def_prop_ro("layers", [](const PyPlan& p) { return p.plan->layers; })
      .def_prop_ro("heads", [](const PyPlan& p) { return p.plan->heads; })
      .def_prop_ro(
          "offsets",
          [](const PyPlan& p) { return offset_view(p.plan->offsets.data(), p.plan->offsets.size(), keeper(p.plan)); })
      .def_prop_ro(
          "indices",
          [](const PyPlan& p) { return number_view(p.plan->indices.data(), p.plan->indices.size(), keeper(p.plan)); })
      .def("head", &all_rows, nb::arg("layer"), nb::arg("head"))
      .def_prop_ro("rows_kept", [](const PyPlan& p) { return p.plan->rows_kept(); })
      .def_prop_ro("rows_full", [](const PyPlan& p) { return p.plan->granted.full; })
      .def_prop_ro("rows_granted", [](const PyPlan& p) { return p.plan->granted.total; })
      .def_prop_ro("specification", [](const PyPlan& p) { return p.plan->specification; })
      .def_prop_ro("budget", [](const PyPlan& p) { return p.plan->asked; })
      .def_prop_ro("audit", [](const PyPlan& p) { return p.plan->audit.entries(); })
      .def(
          "__eq__",
          [](const PyPlan& a, nb::handle other) {
            const PyPlan* b = nullptr;
            return nb::try_cast(other, b) && b && same_rows(*a.plan, *b->plan);
          },
          nb::arg("other").none())
      .def("__repr__", [](const PyPlan& p) {
        return joined_text("<kvevict.Plan ", p.plan->specification, ", ", p.plan->asked, ": ", p.plan->rows_kept(),
                           " rows of ", p.plan->layers, " layers of ", p.plan->heads, " heads>");
      });
}

}  // namespace kvevict::inline KVEVICT_ABI::python
