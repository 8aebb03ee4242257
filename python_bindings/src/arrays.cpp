#include "arrays.hpp"

#include <limits>
#include <utility>

#include "kvevict/core/error.hpp"

namespace kvevict::inline KVEVICT_ABI::python {
namespace {

using Code = nb::dlpack::dtype_code;

bool is(nb::dlpack::dtype t, Code code, int bits) {
  return t.code == static_cast<std::uint8_t>(code) && t.bits == bits && t.lanes == 1;
}

template <class... Parts>
[[noreturn]] void fail_type(const Parts&... parts) {
  throw nb::type_error(joined_text(parts...).c_str());
}

std::string class_name(nb::handle o) { return nb::cast<std::string>(nb::str(o.type().attr("__name__"))); }
bool is_list(nb::handle o) { return nb::isinstance<nb::list>(o) || nb::isinstance<nb::tuple>(o); }

Element read_element(std::string_view name, const Held& a, std::string_view dtype) {
  const auto t = a.dtype();
  if (dtype == "bf16" && is(t, Code::UInt, 16)) return Element::bf16;
  Element e{};
  if (is(t, Code::Float, 32)) e = Element::f32;
  else if (is(t, Code::Float, 16)) e = Element::f16;
  else if (is(t, Code::Bfloat, 16)) e = Element::bf16;
  else
    fail_type(name, ": elements of ", dtype_text(t),
              "; float32, float16 or bfloat16 are required (as numpy has no bfloat16: its bits as uint16, with "
              "dtype=\"bf16\")");
  if (!dtype.empty() && dtype != word_of(e))
    fail_type(name, ": elements of ", dtype_text(t), ", but dtype=\"", dtype, "\" was said");
  return e;
}

// Rows of one array that hold [rows][cols] from `offset` on, where the last two dimensions are those.
RawRows last_two(std::string_view name, const Held& a, Element e, std::int64_t offset) {
  const std::size_t n = a.ndim();
  const std::size_t bytes = e == Element::f32 ? 4 : 2;
  constexpr auto most = static_cast<std::size_t>(std::numeric_limits<index_t>::max());
  if (a.shape(n - 2) > most || a.shape(n - 1) > most)
    fail_argument(name, ": an array ", shape_text(a), "; no dimension may exceed ", most);
  return {static_cast<const char*>(a.data() ? a.data() : nullptr) + offset * static_cast<std::int64_t>(bytes),
          static_cast<std::int64_t>(a.shape(n - 2)), static_cast<index_t>(a.shape(n - 1)), a.stride(n - 2),
          a.stride(n - 1)};
}

void require_dimensions(std::string_view name, const Held& a, std::size_t n, std::string_view shape) {
  if (a.ndim() != n)
    fail_argument(name, ": an array ", shape_text(a), " of ", a.ndim(), " dimensions; ", shape, " is required");
}

}  // namespace

std::string shape_text(const Held& a) {
  std::string out;
  for (std::size_t i = 0; i < a.ndim(); ++i) out += joined_text('[', a.shape(i), ']');
  return out.empty() ? "[]" : out;
}

std::string dtype_text(nb::dlpack::dtype t) {
  const char* kind = is(t, Code::Bool, t.bits)      ? "bool"
                     : is(t, Code::Int, t.bits)     ? "int"
                     : is(t, Code::UInt, t.bits)    ? "uint"
                     : is(t, Code::Float, t.bits)   ? "float"
                     : is(t, Code::Bfloat, t.bits)  ? "bfloat"
                     : is(t, Code::Complex, t.bits) ? "complex"
                                                    : "an unknown type of ";
  return joined_text(kind, static_cast<int>(t.bits));
}

Held read_array(std::string_view name, nb::handle object) {
  Held out;
  if (nb::isinstance<nb::str>(object) || object.is_none() || is_list(object))
    fail_type(name, ": ", class_name(object), " is no array");
  if (!nb::try_cast(object, out, false)) {
    // The array's own library says why it does not show its elements.
    if (nb::hasattr(object, "__dlpack__")) {
      try {
        object.attr("__dlpack__")();
      } catch (nb::python_error& e) {
        fail_argument(name, ": ", class_name(object),
                      " cannot be shown as it is: ", nb::cast<std::string>(nb::str(e.value())));
      }
      fail_argument(name, ": ", class_name(object),
                    " cannot be shown as it is; native elements in host memory are required");
    }
    fail_type(name, ": ", class_name(object), " is no array");
  }
  if (out.device_type() != nb::device::cpu::value && out.device_type() != nb::device::cuda_host::value)
    fail_argument(name, ": the array lies on a device; this module plans in host memory (call .cpu())");
  return out;
}

HeadTable read_heads(std::string_view name, nb::handle object, std::string_view dtype) {
  if (!dtype.empty() && dtype != "f32" && dtype != "f16" && dtype != "bf16")
    fail_argument("dtype: \"", dtype, "\"; f32, f16 or bf16 is required");
  HeadTable out;
  bool first = true;
  const auto take = [&](const std::string& where, nb::handle o, std::size_t n, std::string_view shape) -> const Held& {
    out.held.push_back(read_array(where, o));
    const Held& a = out.held.back();
    require_dimensions(where, a, n, shape);
    const Element e = read_element(where, a, dtype);
    if (!first && e != out.element)
      fail_type(where, ": elements of ", word_of(e), " where the arrays before hold ", word_of(out.element));
    out.element = e;
    first = false;
    return a;
  };
  const auto heads_are = [&](const std::string& where, std::size_t heads) {
    if (out.rows.empty()) out.heads = static_cast<index_t>(heads);
    if (heads != static_cast<std::size_t>(out.heads))
      fail_argument(where, ": ", heads, " heads where the layers before have ", out.heads);
  };

  if (!is_list(object)) {
    const Held& a = take(std::string(name), object, 4, "[layers][heads][tokens][dim]");
    out.layers = static_cast<index_t>(a.shape(0));
    out.heads = static_cast<index_t>(a.shape(1));
    for (std::int64_t l = 0; l < out.layers; ++l)
      for (std::int64_t h = 0; h < out.heads; ++h)
        out.rows.push_back(last_two(name, a, out.element, l * a.stride(0) + h * a.stride(1)));
  } else {
    for (const nb::handle layer : nb::borrow<nb::sequence>(object)) {
      const std::string where = joined_text(name, '[', out.layers, ']');
      if (is_list(layer)) {
        heads_are(where, nb::len(layer));
        index_t h = 0;
        for (const nb::handle head : nb::borrow<nb::sequence>(layer)) {
          const std::string at = joined_text(where, '[', h++, ']');
          out.rows.push_back(last_two(at, take(at, head, 2, "[tokens][dim]"), out.element, 0));
        }
      } else {
        const Held& a = take(where, layer, 3, "[heads][tokens][dim]");
        heads_are(where, a.shape(0));
        for (std::int64_t h = 0; h < out.heads; ++h)
          out.rows.push_back(last_two(where, a, out.element, h * a.stride(0)));
      }
      ++out.layers;
    }
  }
  if (out.rows.empty())
    fail_argument(name, ": ", out.layers, " layers of ", out.heads, " heads; at least 1 of each is required");
  for (std::size_t i = 0; i < out.rows.size(); ++i)
    if (out.rows[i].cols != out.rows[0].cols)
      fail_argument(name, ": layer ", i / static_cast<std::size_t>(out.heads), ", head ",
                    i % static_cast<std::size_t>(out.heads), " has rows of ", out.rows[i].cols,
                    " elements where the first has ", out.rows[0].cols);
  return out;
}

std::vector<index_t> read_numbers(std::string_view name, nb::handle object) {
  std::vector<index_t> out;
  const auto add = [&](std::int64_t n) {
    if (n < 0 || n > std::numeric_limits<index_t>::max())
      fail_argument(name, ": entry ", out.size(), " is ", n, "; 0 to ", std::numeric_limits<index_t>::max(),
                    " is legal");
    out.push_back(static_cast<index_t>(n));
  };
  if (is_list(object)) {
    for (const nb::handle o : nb::borrow<nb::sequence>(object)) {
      std::int64_t n = 0;
      if (nb::isinstance<nb::bool_>(o) || !nb::try_cast(o, n))
        fail_type(name, ": ", class_name(o), " is no whole number");
      add(n);
    }
    return out;
  }
  const Held a = read_array(name, object);
  require_dimensions(name, a, 1, "one dimension");
  const bool small = is(a.dtype(), Code::Int, 32), large = is(a.dtype(), Code::Int, 64);
  if (!small && !large) fail_type(name, ": elements of ", dtype_text(a.dtype()), "; int32 or int64 is required");
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(a.shape(0)); ++i)
    add(small ? static_cast<const std::int32_t*>(a.data())[i * a.stride(0)]
              : static_cast<const std::int64_t*>(a.data())[i * a.stride(0)]);
  return out;
}

FloatReader::FloatReader(std::string_view name, const Held& a) : data_(a.data()), kind_(0) {
  const auto t = a.dtype();
  if (is(t, Code::Float, 32)) kind_ = 0;
  else if (is(t, Code::Float, 64)) kind_ = 1;
  else if (is(t, Code::Float, 16)) kind_ = 2;
  else if (is(t, Code::Bfloat, 16)) kind_ = 3;
  else fail_type(name, ": elements of ", dtype_text(t), "; floating-point numbers are required");
}

float FloatReader::operator()(std::int64_t offset) const {
  switch (kind_) {
    case 0:
      return static_cast<const float*>(data_)[offset];
    case 1:
      return static_cast<float>(static_cast<const double*>(data_)[offset]);
    case 2:
      return to_float(static_cast<const fp16_t*>(data_)[offset]);
    default:
      return to_float(static_cast<const bf16_t*>(data_)[offset]);
  }
}

namespace {
const std::int64_t no_elements = 0;  // what an empty view points to

nb::object view(const void* data, std::size_t dims, const std::size_t* shape, const std::int64_t* strides,
                nb::dlpack::dtype type, nb::handle owner) {
  return nb::cast(nb::ndarray<nb::numpy, nb::ro>(data ? data : &no_elements, dims, shape, owner, strides, type),
                  nb::rv_policy::reference);
}
}  // namespace

nb::object rows_view(Element element, const RawRows& r, nb::handle owner) {
  const nb::dlpack::dtype type{static_cast<std::uint8_t>(element == Element::bf16 ? Code::UInt : Code::Float),
                               static_cast<std::uint8_t>(element == Element::f32 ? 32 : 16), 1};
  const std::size_t shape[2]{static_cast<std::size_t>(r.rows), static_cast<std::size_t>(r.cols)};
  const std::int64_t strides[2]{r.row_stride, r.col_stride};
  return view(r.data, 2, shape, strides, type, owner);
}

nb::object number_view(const index_t* data, std::size_t n, nb::handle owner) {
  return view(data, 1, &n, nullptr, nb::dtype<index_t>(), owner);
}
nb::object offset_view(const std::int64_t* data, std::size_t n, nb::handle owner) {
  return view(data, 1, &n, nullptr, nb::dtype<std::int64_t>(), owner);
}

nb::object number_array(std::vector<index_t> values) {
  const std::size_t n = values.size();
  const index_t* data = values.data();
  return number_view(data, n, keeper(std::move(values)));
}

nb::object float_array(std::vector<float> values, std::size_t rows, std::size_t cols) {
  const float* data = values.data();
  const std::size_t shape[2]{rows, cols};
  return view(data, 2, shape, nullptr, nb::dtype<float>(), keeper(std::move(values)));
}

}  // namespace kvevict::inline KVEVICT_ABI::python
