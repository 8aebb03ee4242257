// kvevict.RaggedCache.
#include <utility>

#include "inputs.hpp"
#include "kvevict/cache/apply.hpp"
#include "objects.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

PyCache make(nb::object keys, nb::object values, nb::object positions, std::optional<std::string> dtype) {
  const auto state = [](auto cache) {
    auto out = std::make_shared<CacheState>(decltype(CacheState::cache){std::move(cache)});
    return PyCache{std::move(out)};
  };
  const PyRecording* recording = nullptr;
  if (nb::try_cast(keys, recording) && recording) {
    if (!values.is_none() || !positions.is_none() || dtype)
      fail_argument("RaggedCache: a recording brings everything with it; no arrays beside it");
    const nb::gil_scoped_release unlocked;
    return std::visit([&]<class T>(const Dump<T>& dump) { return state(RaggedCache<T>(dump.cache())); },
                      recording->dump);
  }
  InputArguments arguments;
  arguments.keys = keys;
  arguments.values = values;
  arguments.positions = positions;
  for (nb::object* o : {&arguments.queries, &arguments.query_positions, &arguments.q_mean, &arguments.q_cov})
    *o = nb::none();
  arguments.dtype = dtype.value_or("");
  const Inputs in = gather(arguments, false);
  if (!in.values) fail_argument("RaggedCache: values are required");
  const nb::gil_scoped_release unlocked;
  return visit_element(in.keys.element, [&]<class T>() { return state(RaggedCache<T>(InputsView<T>{in})); });
}

void apply_plan(PyCache& c, const PyPlan& plan, int threads) {
  const host_exec exec = read_threads(threads);
  const Turn turn(c.state->busy, "RaggedCache");
  if (const int views = c.state->views; views > 0)
    throw nb::buffer_error(joined_text("RaggedCache: ", views,
                                       " arrays show rows of this cache, which move when a plan is applied; copy or "
                                       "delete them first")
                               .c_str());
  const nb::gil_scoped_release unlocked;
  std::visit([&](auto& cache) { apply(exec, *plan.plan, cache); }, c.state->cache);
}

// Counts a view as long as Python holds it.
class View {
 public:
  explicit View(std::shared_ptr<CacheState> state) : state_(std::move(state)) { ++state_->views; }
  View(View&& other) noexcept : state_(std::move(other.state_)) {}
  View& operator=(View&&) = delete;
  ~View() {
    if (state_) --state_->views;
  }

 private:
  std::shared_ptr<CacheState> state_;
};

template <class Get>
auto rows_of(Get get) {
  return [get](const PyCache& c, index_t layer, index_t head) {
    const Turn turn(c.state->busy, "RaggedCache");
    return std::visit(
        [&]<class T>(const RaggedCache<T>& cache) {
          return rows_view(element_of<T>, raw(get(cache, layer, head)), keeper(View(c.state)));
        },
        c.state->cache);
  };
}

template <class F>
auto ask(F f) {
  return [f](const PyCache& c) {
    const Turn turn(c.state->busy, "RaggedCache");
    return std::visit(f, c.state->cache);
  };
}

}  // namespace

void bind_caches(nb::module_& m) {
  nb::class_<PyCache>(m, "RaggedCache", "A copy of keys and values with a length of its own per (layer, head).")
      .def(
          "__init__",
          [](PyCache* self, nb::object keys, nb::object values, nb::object positions,
             std::optional<std::string> dtype) {
            new (self) PyCache(make(std::move(keys), std::move(values), std::move(positions), std::move(dtype)));
          },
          nb::arg("keys"), nb::arg("values") = nb::none(), nb::kw_only(), nb::arg("positions") = nb::none(),
          nb::arg("dtype") = nb::none())
      .def("apply", &apply_plan, nb::arg("plan"), nb::kw_only(), nb::arg("threads") = 1)
      .def_prop_ro("shape", ask([](const auto& c) {
                     const CacheShape s = c.shape();
                     return nb::make_tuple(s.layers, s.kv_heads, s.q_heads, s.head_dim_k, s.head_dim_v);
                   }))
      .def_prop_ro("dtype", ask([]<class T>(const RaggedCache<T>&) { return element_name<T>(); }))
      .def_prop_ro("bytes_live", ask([](const auto& c) { return c.bytes_live(); }))
      .def_prop_ro("bytes_reserved", ask([](const auto& c) { return c.bytes_reserved(); }))
      .def(
          "tokens",
          [](const PyCache& c, index_t layer, index_t head) {
            const Turn turn(c.state->busy, "RaggedCache");
            return std::visit([&](const auto& cache) { return cache.tokens(layer, head); }, c.state->cache);
          },
          nb::arg("layer"), nb::arg("head"))
      .def("keys", rows_of([](const auto& c, index_t l, index_t h) { return c.keys(l, h); }), nb::arg("layer"),
           nb::arg("head"))
      .def("values", rows_of([](const auto& c, index_t l, index_t h) { return c.values(l, h); }), nb::arg("layer"),
           nb::arg("head"))
      .def(
          "positions",
          [](const PyCache& c, index_t layer, index_t head) {
            const Turn turn(c.state->busy, "RaggedCache");
            return std::visit(
                [&](const auto& cache) {
                  const auto p = cache.positions(layer, head);
                  return number_view(p.data(), p.size(), keeper(View(c.state)));
                },
                c.state->cache);
          },
          nb::arg("layer"), nb::arg("head"));
}

}  // namespace kvevict::inline KVEVICT_ABI::python
