// kvevict.Recording, and the metrics that its continuation measures.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kvevict/cache/apply.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/policy/policy.hpp"
#include "objects.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

PyRecording open(const std::string& path, bool mmap) {
  const nb::gil_scoped_release unlocked;
  return visit_dump(
      path,
      [&](const auto& dump) {
        return PyRecording{path, dump, {}};
      },
      mmap ? ReadMode::map : ReadMode::copy);
}

// The continuation of one layer: what asks, and the rows that it brings itself.
template <CacheElement T>
struct Asked {
  std::vector<Rows<const T>> keys, values, queries;
  std::span<const index_t> positions;

  Asked(const RecordedCache<T>& cache, index_t layer) : positions(cache.continuation_positions()) {
    const CacheShape shape = cache.shape();
    for (index_t h = 0; h < shape.q_heads; ++h) {
      queries.push_back(cache.continuation_queries(layer, h));
      if (h >= shape.kv_heads) continue;
      keys.push_back(cache.continuation_keys(layer, h));
      values.push_back(cache.continuation_values(layer, h));
    }
  }
  AttentionQueries<T> asks() const { return {queries, positions}; }
  LocalRows<T> brings() const { return {keys, values, positions}; }
};

// What the tool's compare measures of a plan.
struct Measured {
  std::vector<double> recall, error;  // [layers]
  double gap = 0;
  std::size_t bytes_live = 0, bytes_reserved = 0;
};

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

template <CacheElement T>
void find_truth(const Dump<T>& dump, const host_exec& exec, std::vector<LayerTruth>& truth) {
  const RecordedCache<T>& cache = dump.cache();
  if (cache.continuation_len() == 0)
    fail_argument("metrics: ", dump.name(), " records no continuation to measure with");
  std::vector<LayerTruth> out(static_cast<std::size_t>(cache.shape().layers));
  parallel_for(exec, cache.shape().layers, [&](std::int64_t l) {
    const auto layer = static_cast<index_t>(l);
    const Asked<T> asked(cache, layer);
    out[static_cast<std::size_t>(l)] =
        layer_truth(host_exec{}, cache, layer, asked.asks(), dump.info().softmax_scale, asked.brings());
  });
  truth = std::move(out);
}

template <CacheElement T>
Measured measure(const Dump<T>& dump, const host_exec& exec, const std::vector<LayerTruth>& truth,
                 const EvictionPlan& plan) {
  const RecordedCache<T>& cache = dump.cache();
  RaggedCache<T> live(cache);
  apply(exec, plan, live);
  Measured out;
  out.recall.resize(truth.size());
  out.error.resize(truth.size());
  parallel_for(exec, plan.layers, [&](std::int64_t l) {
    const auto layer = static_cast<index_t>(l);
    const auto at = static_cast<std::size_t>(l);
    const Asked<T> asked(cache, layer);
    out.recall[at] = mass_recall(truth[at], plan.layer(layer).keep);
    out.error[at] = output_error(host_exec{}, truth[at], live, asked.asks(), dump.info().softmax_scale, asked.brings());
  });
  out.gap = oracle_gap(truth, plan.rows_kept(), mean(out.recall));
  out.bytes_live = live.bytes_live();
  out.bytes_reserved = live.bytes_reserved();
  return out;
}

nb::list as_list(const std::vector<double>& values) {
  nb::list out;
  for (const double v : values) out.append(v);
  return out;
}

nb::dict metrics(PyRecording& r, const PyPlan& p, int threads) {
  const host_exec exec = read_threads(threads);
  const EvictionPlan& plan = *p.plan;
  std::vector<LayerTruth> truth = std::move(r.truth);  // taken out, so that another thread does not see it half made
  r.truth.clear();
  Measured m;
  {
    const nb::gil_scoped_release unlocked;
    std::visit(
        [&](const auto& dump) {
          if (truth.empty()) find_truth(dump, exec, truth);
          m = measure(dump, exec, truth, plan);
        },
        r.dump);
  }
  r.truth = std::move(truth);
  nb::dict out;
  out["rows_full"] = std::int64_t{r.info().prompt_len} * r.info().shape.heads_total();
  out["rows_kept"] = plan.rows_kept();
  out["bytes_live"] = m.bytes_live;
  out["bytes_reserved"] = m.bytes_reserved;
  out["mass_recall"] = mean(m.recall);
  out["output_error"] = mean(m.error);
  out["oracle_gap"] = m.gap;
  nb::dict layers;
  layers["mass_recall"] = as_list(m.recall);
  layers["output_error"] = as_list(m.error);
  out["layers"] = layers;
  return out;
}

template <class Get>
auto rows_of(Get get) {
  return [get](const PyRecording& r, index_t layer, index_t head) {
    return std::visit(
        [&]<class T>(const Dump<T>& dump) {
          // A copy of the cache shares the mapped file, and holds it as long as the view lives.
          return rows_view(element_of<T>, raw(get(dump.cache(), layer, head)), keeper(dump.cache()));
        },
        r.dump);
  };
}

template <class Cache>
void check_kv(const Cache& c, index_t l, index_t h) {
  check_head_index("Recording", c.shape(), l, h);
}

template <class Field>
auto info(Field field) {
  return [field](const PyRecording& r) { return field(r.info()); };
}

}  // namespace

void bind_recordings(nb::module_& m) {
  const auto queries = [](auto member) {
    return rows_of([member](const auto& c, index_t l, index_t h) {
      check_layer("Recording", c.shape(), l);
      if (h < 0 || h >= c.shape().q_heads)
        fail_argument("Recording: no query head ", h, "; 0 to ", c.shape().q_heads - 1, " exist");
      return member(c, l, h);
    });
  };
  nb::class_<PyRecording>(m, "Recording", "A recorded model run (a kvevict-dump file), mapped. Arrays are views.")
      .def(
          "__init__",
          [](PyRecording* self, nb::object path, bool mmap) {
            const nb::object text = nb::module_::import_("os").attr("fspath")(path);
            new (self) PyRecording(open(nb::cast<std::string>(text), mmap));
          },
          nb::arg("path"), nb::kw_only(), nb::arg("mmap") = true)
      .def_ro("path", &PyRecording::path)
      .def_prop_ro("model", info([](const DumpInfo& i) { return i.model; }))
      .def_prop_ro("description", info([](const DumpInfo& i) { return i.description; }))
      .def_prop_ro("shape", info([](const DumpInfo& i) {
                     const CacheShape& s = i.shape;
                     return nb::make_tuple(s.layers, s.kv_heads, s.q_heads, s.head_dim_k, s.head_dim_v);
                   }))
      .def_prop_ro("dtype",
                   [](const PyRecording& r) {
                     return std::visit([]<class T>(const Dump<T>&) { return element_name<T>(); }, r.dump);
                   })
      .def_prop_ro("prompt_len", info([](const DumpInfo& i) { return i.prompt_len; }))
      .def_prop_ro("continuation_len", info([](const DumpInfo& i) { return i.tokens() - i.prompt_len; }))
      .def_prop_ro("softmax_scale", info([](const DumpInfo& i) { return i.softmax_scale; }))
      .def_prop_ro("rope", info([](const DumpInfo& i) {
                     return PyRope{i.rope_style, i.rope_inv_freq, i.rope_attention_factor};
                   }))
      .def_prop_ro("token_ids", info([](const DumpInfo& i) { return number_array(i.token_ids); }))
      .def_prop_ro("query_positions", info([](const DumpInfo& i) {
                     const auto prompt =
                         static_cast<std::ptrdiff_t>(i.q_positions.size()) - (i.tokens() - i.prompt_len);
                     return number_array({i.q_positions.begin(), i.q_positions.begin() + prompt});
                   }))
      .def(
          "tokens",
          [](const PyRecording& r, index_t layer, index_t head) {
            check_head_index("Recording", r.info().shape, layer, head);
            return r.info().prompt_len;
          },
          nb::arg("layer"), nb::arg("head"))
      .def("keys", rows_of([](const auto& c, index_t l, index_t h) { return check_kv(c, l, h), c.keys(l, h); }),
           nb::arg("layer"), nb::arg("head"))
      .def("values", rows_of([](const auto& c, index_t l, index_t h) { return check_kv(c, l, h), c.values(l, h); }),
           nb::arg("layer"), nb::arg("head"))
      .def("queries", queries([](const auto& c, index_t l, index_t h) { return c.prompt_queries(l, h); }),
           nb::arg("layer"), nb::arg("q_head"))
      .def(
          "positions",
          [](const PyRecording& r, index_t layer, index_t head) {
            check_head_index("Recording", r.info().shape, layer, head);
            const auto& p = r.info().positions;
            return number_array({p.begin(), p.begin() + r.info().prompt_len});
          },
          nb::arg("layer"), nb::arg("head"))
      .def("__repr__", [](const PyRecording& r) {
        const DumpInfo& i = r.info();
        return joined_text("<kvevict.Recording ", r.path, ": ", i.model, ", ", i.shape.layers, " layers of ",
                           i.shape.kv_heads, " heads, prompt of ", i.prompt_len, " tokens>");
      });
  m.def("metrics", &metrics, nb::arg("recording"), nb::arg("plan"), nb::kw_only(), nb::arg("threads") = 1);
}

}  // namespace kvevict::inline KVEVICT_ABI::python
