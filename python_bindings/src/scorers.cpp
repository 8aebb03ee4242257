// Scorers written in Python: an object with score(observation), and what it is shown.
#include <cmath>
#include <utility>

#include "kvevict/core/error.hpp"
#include "kvevict/naming/any.hpp"
#include "objects.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

using AnyObservation =
    std::variant<const LayerObservation<float>*, const LayerObservation<fp16_t>*, const LayerObservation<bf16_t>*>;

thread_local nb::handle shown_owner;  // see ShownTo

// kvevict.Observation: one layer, while score() runs. The arrays that it gave out live on.
struct PyObservation {
  AnyObservation observation;
  nb::object owner;
  bool over = false;

  template <class F>
  decltype(auto) visit(F&& f) const {
    if (over) fail_argument("Observation: score() has returned; what an observation shows is there while it runs");
    return std::visit([&](const auto* o) -> decltype(auto) { return f(*o); }, observation);
  }
  void check_head(index_t head, std::size_t heads, const char* what) const {
    if (head < 0 || std::cmp_greater_equal(head, heads))
      fail_argument("Observation: no ", what, " of head ", head, "; there are ", heads, " heads of them");
  }

  // Rows of one head: as they are, or as float32, which is a view where they hold float32 and a copy elsewhere.
  template <class T>
  nb::object rows(std::span<const Rows<const T>> all, index_t head, bool raw_rows, const char* what) const {
    check_head(head, all.size(), what);
    const Rows<const T>& r = all[static_cast<std::size_t>(head)];
    if (raw_rows || std::same_as<T, float>) return rows_view(element_of<T>, raw(r), owner);
    std::vector<float> copy;
    copy.reserve(static_cast<std::size_t>(r.rows) * static_cast<std::size_t>(r.cols));
    for (std::int64_t t = 0; t < r.rows; ++t)
      for (index_t c = 0; c < r.cols; ++c) copy.push_back(to_float(r.at(t, c)));
    return float_array(std::move(copy), static_cast<std::size_t>(r.rows), static_cast<std::size_t>(r.cols));
  }
};

Needs need_of(std::string_view word) {
  static constexpr std::pair<std::string_view, Needs> words[] = {{"keys", Needs::keys},
                                                                 {"values", Needs::values},
                                                                 {"positions", Needs::positions},
                                                                 {"rope", Needs::rope},
                                                                 {"window_queries", Needs::window_queries},
                                                                 {"attn_sum", Needs::attn_sum},
                                                                 {"q_stats", Needs::q_stats},
                                                                 {"softmax_scale", Needs::softmax_scale}};
  std::string known;
  for (const auto& [name, need] : words) {
    if (name == word) return need;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  fail_argument("scorer: needs names '", word, "'; ", known, " are known");
}

// An attribute of the scorer, or what it is where the scorer has none.
template <class V>
V attribute(nb::handle o, const char* name, V otherwise) {
  if (!nb::hasattr(o, name)) return otherwise;
  V out{};
  if (!nb::try_cast(nb::object(o.attr(name)), out, false))
    throw nb::type_error(joined_text("scorer: its attribute ", name, " is of another type").c_str());
  return out;
}

// The Python object, released under the interpreter's lock wherever the last policy or planner goes.
std::shared_ptr<const nb::object> locked(nb::object o) {
  return {new nb::object(std::move(o)), [](const nb::object* p) {
            const nb::gil_scoped_acquire lock;
            delete p;
          }};
}

struct PythonScorer {
  std::shared_ptr<const nb::object> object;
  std::string text;
  Needs needs = Needs::keys;
  bool heads_comparable = false;
  index_t window = 0;
  Protect protects;

  index_t window_rows() const noexcept { return window; }
  Protect protection() const noexcept { return protects; }
  std::string specification() const { return text; }
};

void read_row(const std::string& name, const Held& a, std::int64_t offset, std::int64_t stride, std::span<float> out) {
  const FloatReader at(name, a);
  for (std::size_t t = 0; t < out.size(); ++t) out[t] = at(offset + static_cast<std::int64_t>(t) * stride);
}

template <class T>
void read_scores(const std::string& name, nb::handle result, const LayerObservation<T>& o, Matrix<float> out) {
  const auto row = [&](index_t h) { return std::span(out.row(h), static_cast<std::size_t>(o.tokens(h))); };
  if (nb::isinstance<nb::list>(result) || nb::isinstance<nb::tuple>(result)) {
    if (nb::len(result) != static_cast<std::size_t>(out.rows))
      fail_argument(name, ": score() gave ", nb::len(result), " arrays for ", out.rows, " heads");
    for (index_t h = 0; h < out.rows; ++h) {
      const Held a = read_array(name, nb::object(result[h]));
      if (a.ndim() != 1 || a.shape(0) != row(h).size())
        fail_argument(name, ": score() gave ", shape_text(a), " for head ", h, "; [", o.tokens(h), "] is required");
      read_row(name, a, 0, a.stride(0), row(h));
    }
    return;
  }
  const Held a = read_array(name, result);
  if (a.ndim() != 2 || std::cmp_not_equal(a.shape(0), out.rows) || std::cmp_not_equal(a.shape(1), o.most_tokens()))
    fail_argument(name, ": score() gave ", shape_text(a), "; [heads][tokens] = [", out.rows, "][", o.most_tokens(),
                  "] is required");
  for (index_t h = 0; h < out.rows; ++h) read_row(name, a, h * a.stride(0), a.stride(1), row(h));
}

template <CacheElement T>
void score_on(const host_exec&, const PythonScorer& scorer, const LayerObservation<T>& o, Matrix<float> out) {
  check_inputs(scorer.text, scorer.needs, scorer.window, o);
  const nb::gil_scoped_acquire lock;
  auto* shown = new PyObservation{AnyObservation{&o}, nb::borrow(shown_owner), false};
  const nb::object observation = nb::cast(shown, nb::rv_policy::take_ownership);
  const struct Over {
    PyObservation* o;
    ~Over() { o->over = true; }
  } over{shown};
  const nb::object result = scorer.object->attr("score")(observation);
  read_scores(scorer.text, result, o, out);
}

static_assert(TokenScorer<PythonScorer, float> && TokenScorer<PythonScorer, bf16_t>);

nb::object optional_floats(std::span<const Rows<const float>> rows, const PyObservation& o) {
  if (rows.empty()) return nb::none();
  return rows_view(Element::f32, raw(rows[0]), o.owner);
}

}  // namespace

ShownTo::ShownTo(nb::handle owner) : before_(shown_owner) { shown_owner = owner; }
ShownTo::~ShownTo() { shown_owner = before_; }

AnyScorer python_scorer(nb::object o) {
  if (!nb::hasattr(o, "score") || !PyCallable_Check(nb::object(o.attr("score")).ptr()))
    throw nb::type_error("scorer: an object with score(observation) is required");
  PythonScorer s;
  const auto type = nb::cast<std::string>(nb::object(o.type().attr("__name__")));
  s.text = attribute<std::string>(o, "specification", attribute<std::string>(o, "name", type));
  s.heads_comparable = attribute(o, "heads_comparable", false);
  s.window = attribute<index_t>(o, "window", 0);
  s.protects = {attribute<index_t>(o, "sinks", 0), s.window, ProtectShare::half};
  if (s.window < 0 || s.protects.sinks < 0)
    fail_argument(s.text, ": window ", s.window, " and sinks ", s.protects.sinks, "; 0 or more are required");
  const auto share = attribute<std::string>(o, "protect", "half");
  if (share != "half" && share != "full") fail_argument(s.text, ": protect \"", share, "\"; half or full is required");
  if (share == "full") s.protects.share = ProtectShare::full;
  if (nb::hasattr(o, "needs"))
    for (const nb::handle word : nb::object(o.attr("needs"))) {
      std::string need;
      if (!nb::try_cast(word, need)) throw nb::type_error("scorer: needs is a tuple of words");
      s.needs = s.needs | need_of(need);
    }
  s.object = locked(std::move(o));
  return AnyScorer(std::move(s));
}

void bind_scorers(nb::module_& m) {
  const auto head_rows = [](auto member, const char* what) {
    return [member, what](const PyObservation& o, index_t head, bool raw_rows) {
      return o.visit([&]<class T>(const LayerObservation<T>& l) { return o.rows(member(l), head, raw_rows, what); });
    };
  };
  nb::class_<PyObservation>(m, "Observation",
                            "One layer as a scorer sees it, valid while score() runs. Arrays are views of the rows "
                            "that were handed to plan(), read-only; those taken from it live on.")
      .def_prop_ro("layer", [](const PyObservation& o) { return o.visit([](const auto& l) { return l.layer; }); })
      .def_prop_ro("shape",
                   [](const PyObservation& o) {
                     return o.visit([](const auto& l) {
                       const CacheShape& s = l.shape;
                       return nb::make_tuple(s.layers, s.kv_heads, s.q_heads, s.head_dim_k, s.head_dim_v);
                     });
                   })
      .def_prop_ro("heads",
                   [](const PyObservation& o) { return o.visit([](const auto& l) { return l.shape.kv_heads; }); })
      .def_prop_ro("group",
                   [](const PyObservation& o) { return o.visit([](const auto& l) { return l.shape.group(); }); })
      .def_prop_ro("dtype",
                   [](const PyObservation& o) {
                     return o.visit([]<class T>(const LayerObservation<T>&) { return element_name<T>(); });
                   })
      .def_prop_ro("softmax_scale",
                   [](const PyObservation& o) { return o.visit([](const auto& l) { return l.softmax_scale; }); })
      .def_prop_ro("rope",
                   [](const PyObservation& o) -> nb::object {
                     return o.visit([](const auto& l) -> nb::object {
                       const Rope& r = l.rope;
                       if (r.inv_freq.empty()) return nb::none();
                       return nb::cast(PyRope{r.style, {r.inv_freq.begin(), r.inv_freq.end()}, r.attention_factor});
                     });
                   })
      .def(
          "tokens",
          [](const PyObservation& o, index_t head) {
            return o.visit([&](const auto& l) {
              o.check_head(head, l.keys.size(), "tokens");
              return l.tokens(head);
            });
          },
          nb::arg("head"))
      .def("keys", head_rows([](const auto& l) { return l.keys; }, "keys"), nb::arg("head"), nb::arg("raw") = false)
      .def("values", head_rows([](const auto& l) { return l.values; }, "values"), nb::arg("head"),
           nb::arg("raw") = false)
      .def("queries", head_rows([](const auto& l) { return l.window_queries; }, "queries"), nb::arg("q_head"),
           nb::arg("raw") = false)
      .def(
          "positions",
          [](const PyObservation& o, index_t head) {
            return o.visit([&](const auto& l) {
              o.check_head(head, l.positions.size(), "positions");
              const auto p = l.positions[static_cast<std::size_t>(head)];
              return number_array({p.begin(), p.end()});
            });
          },
          nb::arg("head"))
      .def_prop_ro("query_positions",
                   [](const PyObservation& o) {
                     return o.visit([](const auto& l) {
                       return number_array({l.window_positions.begin(), l.window_positions.end()});
                     });
                   })
      .def_prop_ro("attn_sum",
                   [](const PyObservation& o) {
                     return o.visit([&](const auto& l) { return optional_floats(l.extras.attn_sum, o); });
                   })
      .def_prop_ro("q_mean", [](const PyObservation& o) {
        return o.visit([&](const auto& l) { return optional_floats(l.extras.q_mean, o); });
      });
}

}  // namespace kvevict::inline KVEVICT_ABI::python
