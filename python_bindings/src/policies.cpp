// kvevict.Policy and kvevict.Planner.
#include <utility>

#include "inputs.hpp"
#include "kvevict/core/protect.hpp"
#include "objects.hpp"
#include "parts.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

// Scorers of Python by name: name -> object, or class called with the text's arguments. Never freed: the interpreter
// may be gone before static objects are.
nb::dict& named_scorers() {
  static auto* names = new nb::dict();
  return *names;
}

// A value of a policy's text: a number, true, false, or text.
nb::object value_of(const std::string& text) {
  if (text == "true" || text == "false") return nb::bool_(text == "true");
  std::int64_t whole = 0;
  if (parse_value(text, whole)) return nb::int_(whole);
  double real = 0;
  if (parse_value(text, real)) return nb::float_(real);
  return nb::str(text.c_str());
}

AnyScorer named_scorer(const PartText& part) {
  if (part.base) fail_argument("scorer ", part.name, " is written in Python and wraps no scorer");
  nb::object made = nb::object(named_scorers()[part.name.c_str()]);
  if (PyType_Check(made.ptr())) {
    nb::dict arguments;
    for (const auto& [key, value] : part.args) arguments[key.c_str()] = value_of(value);
    made = made(**arguments);
  } else if (!part.args.empty()) {
    fail_argument("scorer ", part.name, ": it was registered as an object and takes no parameters; register its class");
  }
  return python_scorer(made);
}

// kvevict.Policy.
struct PyPolicy {
  AnyPolicy policy;
};

AnyPolicy build(const std::string& text, nb::object scorer) {
  const PolicyText tree = parse_policy(text);
  if (!scorer.is_none()) {
    if (tree.scorer)
      fail_argument("policy '", text, "': it names a scorer already; with scorer= the text is an allocator");
    return {registry().allocator(tree.first), python_scorer(std::move(scorer)), {}};
  }
  const auto ours = [&](const PartText& part) { return named_scorers().contains(part.name.c_str()); };
  if (tree.scorer && ours(*tree.scorer)) return {registry().allocator(tree.first), named_scorer(*tree.scorer), {}};
  if (!tree.scorer && ours(tree.first)) {
    PartText uniform;
    uniform.name = "uniform";
    return {registry().allocator(uniform), named_scorer(tree.first), {}};
  }
  return registry().policy(text);
}

struct RunOptions {
  Budget budget;
  PlanOptions options;
  host_exec exec;
};

RunOptions read_run(std::optional<double> retain, std::optional<std::int64_t> rows, std::optional<std::int64_t> bytes,
                    index_t first, std::optional<index_t> last, index_t align, index_t recent, int threads) {
  PlanOptions options;
  options.first = first;
  if (last) options.last = *last;
  options.align = align;
  options.recent = recent;
  return {read_budget(retain, rows, bytes), options, read_threads(threads)};
}

PyPlan plan_recording(const AnyPolicy& policy, nb::handle object, const PyRecording& recording, RunOptions run) {
  const ShownTo owner(object);
  const nb::gil_scoped_release unlocked;
  return std::visit(
      [&]<class T>(const Dump<T>& dump) {
        const Observations<T> observations = observe_all(dump);
        run.options.row_bytes = bytes_per_row<T>(dump.cache().shape());
        auto planner =
            make_planner(policy, dump.cache().shape(), detail::tokens_of(dump.cache()), run.budget, run.options);
        for (const auto& o : observations.layers()) (void)give_layer(planner, run.exec, o);
        return own(finish(planner, run.exec));
      },
      recording.dump);
}

PyPlan plan_arrays(const AnyPolicy& policy, const InputArguments& arguments, RunOptions run) {
  const Inputs in = gather(arguments, false);
  if (run.budget.unit() == Budget::Unit::bytes && !in.values)
    fail_argument("bytes: a budget in bytes counts keys and values; give the values");
  // What a scorer of Python keeps of an observation holds the caller's arrays.
  const nb::object held = nb::make_tuple(arguments.keys, arguments.values, arguments.queries, arguments.q_mean);
  const ShownTo owner(held);
  const nb::gil_scoped_release unlocked;
  return visit_element(in.keys.element, [&]<class T>() {
    run.options.row_bytes = bytes_per_row<T>(in.shape);
    auto planner = make_planner(policy, in.shape, in.tokens(), run.budget, run.options);
    for (index_t l = 0; l < in.shape.layers; ++l) {
      const OwnedObservation<T> layer = in.layer<T>(l, l, in.shape);
      (void)give_layer(planner, run.exec, layer.observation());
    }
    return own(finish(planner, run.exec));
  });
}

InputArguments arguments_of(nb::object keys, nb::object values, nb::object queries, std::optional<float> softmax_scale,
                            nb::object positions, nb::object query_positions, const PyRope* rope, nb::object q_mean,
                            nb::object q_cov, index_t q_stats_first, std::optional<std::string> dtype) {
  return {std::move(keys),
          std::move(values),
          std::move(queries),
          std::move(positions),
          std::move(query_positions),
          std::move(q_mean),
          std::move(q_cov),
          softmax_scale,
          rope,
          q_stats_first,
          dtype.value_or("")};
}

PyPlan plan(const PyPolicy& p, nb::object keys, nb::object values, nb::object queries, std::optional<double> retain,
            std::optional<std::int64_t> rows, std::optional<std::int64_t> bytes, std::optional<float> softmax_scale,
            nb::object positions, nb::object query_positions, const PyRope* rope, nb::object q_mean, nb::object q_cov,
            index_t q_stats_first, std::optional<std::string> dtype, index_t first, std::optional<index_t> last,
            index_t align, index_t recent, int threads) {
  const RunOptions run = read_run(retain, rows, bytes, first, last, align, recent, threads);
  const PyRecording* recording = nullptr;
  if (nb::try_cast(keys, recording) && recording) {
    for (const nb::object* o : {&values, &queries, &positions, &query_positions, &q_mean, &q_cov})
      if (!o->is_none()) fail_argument("plan: a recording brings everything with it; no arrays beside it");
    if (rope || softmax_scale || dtype) fail_argument("plan: a recording brings rope, softmax_scale and dtype with it");
    return plan_recording(p.policy, keys, *recording, run);
  }
  return plan_arrays(p.policy,
                     arguments_of(keys, values, queries, softmax_scale, positions, query_positions, rope, q_mean, q_cov,
                                  q_stats_first, std::move(dtype)),
                     run);
}

// kvevict.Planner.
struct PyPlanner {
  AnyPlanner planner;
  CacheShape shape;
  index_t next = 0;
  bool spent = false;
  host_exec exec;
  std::atomic<bool> busy{false};

  PyPlanner(AnyPlanner p, const CacheShape& s, const host_exec& e) : planner(std::move(p)), shape(s), exec(e) {}
  void check() const {
    if (spent) fail_argument("planner: finish() was called; a planner makes one plan");
  }
};

nb::object answer(const PyPlanner& p, const LayerPlan& plan) {
  if (!p.planner.layerwise()) return nb::none();
  nb::list out;
  for (index_t h = 0; h < p.shape.kv_heads; ++h) {
    const auto rows = plan.keep.head(h);
    out.append(number_array({rows.begin(), rows.end()}));
  }
  return out;
}

nb::object plan_layer(PyPlanner& p, nb::object keys, nb::object values, nb::object queries, nb::object scores,
                      std::optional<float> softmax_scale, nb::object positions, nb::object query_positions,
                      const PyRope* rope, nb::object q_mean, nb::object q_cov, index_t q_stats_first,
                      std::optional<std::string> dtype) {
  const Turn turn(p.busy, "planner");
  p.check();
  if (scores.is_none() == keys.is_none()) fail_argument("layer: either keys or scores are required");
  if (!scores.is_none()) {
    const Held a = read_array("scores", scores);
    if (a.ndim() != 2 || a.dtype() != nb::dtype<float>())
      throw nb::type_error(joined_text("scores: ", shape_text(a), " of ", dtype_text(a.dtype()),
                                       "; [heads][tokens] of float32 is required")
                               .c_str());
    if (a.stride(1) != 1 && a.shape(1) > 1)
      fail_argument("scores: tokens lie ", a.stride(1), " elements apart; 1 is required");
    const auto cols = static_cast<index_t>(a.shape(1));
    const Matrix<const float> matrix{static_cast<const float*>(a.data()), static_cast<index_t>(a.shape(0)), cols,
                                     a.shape(0) > 1 ? a.stride(0) : cols};
    LayerPlan plan;
    {
      const nb::gil_scoped_release unlocked;
      plan = give_scores(p.planner, p.exec, matrix);
    }
    ++p.next;
    return answer(p, plan);
  }
  const Inputs in = gather(arguments_of(keys, values, queries, softmax_scale, positions, query_positions, rope, q_mean,
                                        q_cov, q_stats_first, std::move(dtype)),
                           true);
  if (p.next >= p.shape.layers) fail_argument("planner: all ", p.next, " layers have been given");
  CacheShape shape = p.shape;
  shape.kv_heads = in.shape.kv_heads;
  shape.head_dim_k = in.shape.head_dim_k;
  if (in.values) shape.head_dim_v = in.shape.head_dim_v;
  if (in.queries) shape.q_heads = in.shape.q_heads;
  const nb::object held = nb::make_tuple(keys, values, queries, q_mean);
  LayerPlan plan;
  {
    const ShownTo owner(held);
    const nb::gil_scoped_release unlocked;
    plan = visit_element(in.keys.element, [&]<class T>() {
      const OwnedObservation<T> layer = in.layer<T>(0, p.next, shape);
      return give_layer(p.planner, p.exec, layer.observation());
    });
  }
  ++p.next;
  return answer(p, plan);
}

PyPlan finish_planner(PyPlanner& p) {
  const Turn turn(p.busy, "planner");
  p.check();
  const nb::gil_scoped_release unlocked;
  EvictionPlan plan = finish(p.planner, p.exec);
  p.spent = true;
  return own(std::move(plan));
}

PyPlanner* new_planner(const PyPolicy& p, nb::object tokens, index_t layers, index_t kv_heads, index_t q_heads,
                       index_t head_dim, std::optional<index_t> head_dim_v, std::optional<double> retain,
                       std::optional<std::int64_t> rows, std::optional<std::int64_t> bytes, std::int64_t row_bytes,
                       index_t first, std::optional<index_t> last, index_t align, index_t recent, int threads) {
  RunOptions run = read_run(retain, rows, bytes, first, last, align, recent, threads);
  run.options.row_bytes = row_bytes;
  const CacheShape shape{layers, kv_heads, q_heads, head_dim, head_dim_v.value_or(head_dim)};
  check_shape(shape);
  std::vector<index_t> counts;
  index_t all = 0;
  if (nb::try_cast(tokens, all)) counts.assign(static_cast<std::size_t>(shape.heads_total()), all);
  else counts = read_numbers("tokens", tokens);
  return new PyPlanner(make_planner(p.policy, shape, counts, run.budget, run.options), shape, run.exec);
}

nb::dict policies() {
  nb::dict out;
  for (const auto& [name, preset] : registry().presets())
    out[name.c_str()] = nb::make_tuple(nb::str(preset.text.c_str()), nb::str(preset.about.c_str()));
  return out;
}

void register_scorer(const std::string& name, nb::object scorer) {
  const PolicyText tree = parse_policy(name);
  if (tree.scorer || tree.first.base || !tree.first.args.empty())
    fail_argument("register_scorer: '", name, "' is no name");
  const auto taken = [&](const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (taken(registry().scorer_names()) || taken(registry().allocator_names()) || registry().presets().count(name))
    fail_argument("register_scorer: '", name, "' is a part or a policy of the library already");
  if (!PyType_Check(scorer.ptr())) (void)python_scorer(scorer);
  else if (!nb::hasattr(scorer, "score")) throw nb::type_error("register_scorer: the class has no score(observation)");
  named_scorers()[name.c_str()] = scorer;
}

}  // namespace

void bind_policies(nb::module_& m) {
  m.def("policies", &policies, "The published policies: name -> (text, what it is).");
  m.def("scorers", [] {
    std::vector<std::string> names = registry().scorer_names();
    for (const auto& [name, object] : named_scorers()) names.push_back(nb::cast<std::string>(name));
    return names;
  });
  m.def("allocators", [] { return registry().allocator_names(); });
  m.def("register_scorer", &register_scorer, nb::arg("name"), nb::arg("scorer"));

  nb::class_<PyPolicy>(m, "Policy", "An allocator, a scorer and a selector, by text.")
      .def(
          "__init__",
          [](PyPolicy* p, const std::string& text, nb::object scorer) { new (p) PyPolicy{build(text, scorer)}; },
          nb::arg("text"), nb::kw_only(), nb::arg("scorer") = nb::none())
      .def_prop_ro("specification", [](const PyPolicy& p) { return p.policy.specification(); })
      .def_prop_ro("layerwise", [](const PyPolicy& p) { return p.policy.layerwise(); })
      .def_prop_ro("window_rows", [](const PyPolicy& p) { return p.policy.scorer.window_rows(); })
      .def("__repr__", [](const PyPolicy& p) { return "kvevict.Policy('" + p.policy.specification() + "')"; })
      .def("plan", &plan, nb::arg("keys"), nb::arg("values") = nb::none(), nb::arg("queries") = nb::none(),
           nb::kw_only(), nb::arg("retain") = nb::none(), nb::arg("rows") = nb::none(), nb::arg("bytes") = nb::none(),
           nb::arg("softmax_scale") = nb::none(), nb::arg("positions") = nb::none(),
           nb::arg("query_positions") = nb::none(), nb::arg("rope") = nb::none(), nb::arg("q_mean") = nb::none(),
           nb::arg("q_cov") = nb::none(), nb::arg("q_stats_first") = 0, nb::arg("dtype") = nb::none(),
           nb::arg("first") = 0, nb::arg("last") = nb::none(), nb::arg("align") = 1, nb::arg("recent") = 0,
           nb::arg("threads") = 1)
      .def("make_planner", &new_planner, nb::rv_policy::take_ownership, nb::arg("tokens"), nb::kw_only(),
           nb::arg("layers"), nb::arg("kv_heads"), nb::arg("q_heads"), nb::arg("head_dim"),
           nb::arg("head_dim_v") = nb::none(), nb::arg("retain") = nb::none(), nb::arg("rows") = nb::none(),
           nb::arg("bytes") = nb::none(), nb::arg("row_bytes") = 0, nb::arg("first") = 0, nb::arg("last") = nb::none(),
           nb::arg("align") = 1, nb::arg("recent") = 0, nb::arg("threads") = 1);

  nb::class_<PyPlanner>(m, "Planner", "Plans layer by layer; made by Policy.make_planner().")
      .def_prop_ro("layerwise", [](const PyPlanner& p) { return p.planner.layerwise(); })
      .def_prop_ro("rows_granted", [](const PyPlanner& p) { return p.planner.granted().total; })
      .def("layer", &plan_layer, nb::arg("keys") = nb::none(), nb::arg("values") = nb::none(),
           nb::arg("queries") = nb::none(), nb::kw_only(), nb::arg("scores") = nb::none(),
           nb::arg("softmax_scale") = nb::none(), nb::arg("positions") = nb::none(),
           nb::arg("query_positions") = nb::none(), nb::arg("rope") = nb::none(), nb::arg("q_mean") = nb::none(),
           nb::arg("q_cov") = nb::none(), nb::arg("q_stats_first") = 0, nb::arg("dtype") = nb::none())
      .def("finish", &finish_planner);
}

}  // namespace kvevict::inline KVEVICT_ABI::python
