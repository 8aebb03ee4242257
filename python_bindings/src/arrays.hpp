// Arrays of Python as rows of the library, and back. Nothing is copied in either direction: what comes in is held while
// it is looked at, what goes out keeps its owner alive.
#pragma once
// All casters stand here: a unit that lacked one would convert the same type in another way.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::python {

namespace nb = nanobind;
using Held = nb::ndarray<nb::ro>;  // an array of any library, held by a reference

enum class Element { f32, f16, bf16 };
constexpr const char* word_of(Element e) { return e == Element::f32 ? "f32" : e == Element::f16 ? "f16" : "bf16"; }
template <CacheElement T>
constexpr Element element_of = std::same_as<T, float>    ? Element::f32
                               : std::same_as<T, fp16_t> ? Element::f16
                                                         : Element::bf16;

// f.template operator()<T>() with the type that `e` names.
template <class F>
decltype(auto) visit_element(Element e, F&& f) {
  switch (e) {
    case Element::f32:
      return f.template operator()<float>();
    case Element::f16:
      return f.template operator()<fp16_t>();
    default:
      return f.template operator()<bf16_t>();
  }
}

// [rows][cols] of elements that a run-time value names; strides count elements.
struct RawRows {
  const void* data = nullptr;
  std::int64_t rows = 0;
  index_t cols = 0;
  std::int64_t row_stride = 0, col_stride = 1;

  template <class T>
  Rows<const T> as() const {
    return {static_cast<const T*>(data), rows, cols, row_stride, col_stride};
  }
};
template <class T>
RawRows raw(const Rows<const T>& r) {
  return {r.data, r.rows, r.cols, r.row_stride, r.col_stride};
}

// What [layers][heads][rows][cols] holds: one array, a list of one array a layer, or a list of lists of one array a
// head, in which heads may be of different lengths.
struct HeadTable {
  Element element{};
  index_t layers = 0, heads = 0;
  std::vector<RawRows> rows;  // [layers * heads]
  std::vector<Held> held;

  const RawRows& at(index_t layer, index_t head) const {
    return rows[static_cast<std::size_t>(layer) * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)];
  }
};

// Throws ValueError or TypeError that begins with `name`: no array, another element type, other dimensions, another
// device. dtype: empty, or "bf16" where arrays of uint16 hold the bits of bfloat16.
HeadTable read_heads(std::string_view name, nb::handle object, std::string_view dtype);

// Any array of host memory. Throws as read_heads does.
Held read_array(std::string_view name, nb::handle object);
std::string shape_text(const Held& a);
std::string dtype_text(nb::dlpack::dtype t);

// Whole numbers from 0 on in one dimension, as rows count: int32 or int64, or a sequence of int. A copy.
std::vector<index_t> read_numbers(std::string_view name, nb::handle object);
// Reads element i of a row of float32, float64, float16 or bfloat16 as a float. Throws TypeError for other types.
class FloatReader {
 public:
  FloatReader(std::string_view name, const Held& a);
  float operator()(std::int64_t offset) const;  // elements from the beginning

 private:
  const void* data_;
  int kind_;
};

// Views for Python, read-only, bf16 as uint16. `owner` lives as long as the view.
nb::object rows_view(Element element, const RawRows& rows, nb::handle owner);
nb::object number_view(const index_t* data, std::size_t n, nb::handle owner);
nb::object offset_view(const std::int64_t* data, std::size_t n, nb::handle owner);

// New arrays that own a copy.
nb::object number_array(std::vector<index_t> values);
nb::object float_array(std::vector<float> values, std::size_t rows, std::size_t cols);

// A Python object that keeps `value` alive: the owner of views.
template <class T>
nb::object keeper(T value) {
  auto* kept = new T(std::move(value));
  return nb::capsule(kept, [](void* p) noexcept { delete static_cast<T*>(p); });
}

}  // namespace kvevict::inline KVEVICT_ABI::python
