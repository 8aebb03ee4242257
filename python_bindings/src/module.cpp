// The Python module of one instruction set.
#include <nanobind/nanobind.h>

#include <string>
#include <system_error>
#include <utility>

#include "kvevict/lkv/soft_topk.hpp"
#include "kvevict/rope/frequencies.hpp"
#include "objects.hpp"
#include "parts.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

using Doubles = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;

SoftThreshold threshold_kind(const std::string& word) {
  SoftThreshold kind{};
  if (!parse_value(word, kind)) fail_argument("soft_topk: kind \"", word, "\"; ", value_kind(kind), " is required");
  return kind;
}

// A new array of the same shape that Python may write to.
nb::object like(std::vector<double> values, const Doubles& a) {
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < a.ndim(); ++i) shape.push_back(a.shape(i));
  double* data = values.data();
  return nb::cast(nb::ndarray<nb::numpy, double>(data, shape.size(), shape.data(), keeper(std::move(values))),
                  nb::rv_policy::reference);
}

nb::tuple soft_topk_array(const Doubles& scores, double k, double temperature, const std::string& word) {
  const SoftThreshold kind = threshold_kind(word);
  if (scores.ndim() != 1) fail_argument("soft_topk: scores of ", scores.ndim(), " dimensions; 1 is required");
  const std::span<const double> in(scores.data(), scores.shape(0));
  std::vector<double> mask(in.size()), scratch(soft_topk_scratch(in.size()));
  double threshold = 0;
  {
    const nb::gil_scoped_release unlocked;
    threshold = soft_topk<double>(in, k, temperature, mask, scratch, kind);
  }
  return nb::make_tuple(like(std::move(mask), scores), threshold);
}

nb::tuple soft_topk_gradient(const Doubles& scores, double threshold, double temperature, const Doubles& grad_mask,
                             const std::string& word) {
  const SoftThreshold kind = threshold_kind(word);
  if (scores.ndim() != 1 || grad_mask.ndim() != 1)
    fail_argument("soft_topk_backward: scores of ", scores.ndim(), " and gradients of ", grad_mask.ndim(),
                  " dimensions; 1 is required");
  if (!(temperature > 0)) fail_argument("soft_topk_backward: temperature ", temperature, "; it must be positive");
  std::vector<double> out(scores.shape(0));
  const SoftTopKGradient g = soft_topk_backward<double>({scores.data(), scores.shape(0)}, threshold, temperature,
                                                        {grad_mask.data(), grad_mask.shape(0)}, out, kind);
  return nb::make_tuple(like(std::move(out), scores), g.k, g.temperature);
}

PyRope make_rope(std::optional<std::vector<float>> inv_freq, std::optional<double> theta,
                 std::optional<index_t> rotary_dim, const std::string& style, float attention_factor) {
  PyRope out;
  if (!parse_value(style, out.style))
    fail_argument("Rope: style \"", style, "\"; ", value_kind(out.style), " is required");
  if (inv_freq.has_value() == theta.has_value() || theta.has_value() != rotary_dim.has_value())
    fail_argument("Rope: either inv_freq, or theta and rotary_dim, are required");
  if (theta && !(*theta > 0)) fail_argument("Rope: theta ", *theta, "; a positive number is required");
  if (rotary_dim && (*rotary_dim < 2 || *rotary_dim % 2 != 0))
    fail_argument("Rope: rotary_dim ", *rotary_dim, "; an even number from 2 on is required");
  out.inv_freq = inv_freq ? std::move(*inv_freq) : rope_frequencies(*theta, *rotary_dim);
  out.attention_factor = attention_factor;
  return out;
}

// The library's errors as Python's, with the same text. std::invalid_argument and std::domain_error are ValueError
// already.
void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const format_error& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::system_error& e) {
    PyErr_SetString(PyExc_OSError, e.what());
  }
}

void bind(nb::module_& m) {
  nb::register_exception_translator(&translate);
  m.def("set_data_folder", [](const std::string& folder) { set_data_folder(folder); });
  m.def("build_info", [] {
    nb::dict out;
    out["version"] = joined_text(KVEVICT_VERSION_MAJOR, '.', KVEVICT_VERSION_MINOR, '.', KVEVICT_VERSION_PATCH);
    out["path"] = KVEVICT_PYTHON_PATH;
    out["simd"] = simd_path();
    out["compiler"] = __VERSION__;
    return out;
  });
  m.def("soft_topk", &soft_topk_array, nb::arg("scores"), nb::arg("k"), nb::arg("temperature") = 1.0, nb::kw_only(),
        nb::arg("kind") = "laplace");
  m.def("soft_topk_backward", &soft_topk_gradient, nb::arg("scores"), nb::arg("threshold"), nb::arg("temperature"),
        nb::arg("grad_mask"), nb::kw_only(), nb::arg("kind") = "laplace");
  nb::class_<PyRope>(m, "Rope", "How keys and queries were rotated.")
      .def(
          "__init__",
          [](PyRope* self, std::optional<std::vector<float>> inv_freq, std::optional<double> theta,
             std::optional<index_t> rotary_dim, const std::string& style, float attention_factor) {
            new (self) PyRope(make_rope(std::move(inv_freq), theta, rotary_dim, style, attention_factor));
          },
          nb::kw_only(), nb::arg("inv_freq") = nb::none(), nb::arg("theta") = nb::none(),
          nb::arg("rotary_dim") = nb::none(), nb::arg("style") = "half", nb::arg("attention_factor") = 1.f)
      .def_prop_ro("inv_freq", [](const PyRope& r) { return r.inv_freq; })
      .def_prop_ro("style", [](const PyRope& r) { return std::string(word_of(r.style)); })
      .def_ro("attention_factor", &PyRope::attention_factor);
  bind_plans(m);
  bind_scorers(m);
  bind_policies(m);
  bind_recordings(m);
  bind_caches(m);
}

}  // namespace
}  // namespace kvevict::inline KVEVICT_ABI::python

#define KVEVICT_MAKE_MODULE(name, module) NB_MODULE(name, module)
KVEVICT_MAKE_MODULE(KVEVICT_PYTHON_MODULE, m) { kvevict::python::bind(m); }
