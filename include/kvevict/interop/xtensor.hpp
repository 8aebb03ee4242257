// xtensor views of our rows and matrices, and ours of theirs. Nothing is copied: both sides see the same memory, which
// must outlive the views.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/interop/row_major.hpp"
#include "kvevict/interop/xtensor_headers.hpp"

namespace kvevict::inline KVEVICT_ABI {

namespace detail {
template <class T>
auto xtensor_view(T* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride, std::int64_t col_stride) {
  static_assert(std::is_arithmetic_v<T>, "fp16_t and bf16_t hold bits; convert them before computing");
  // xtensor wants stride 0 where there is only one entry.
  const std::array<std::size_t, 2> shape{static_cast<std::size_t>(rows), static_cast<std::size_t>(cols)};
  const std::array<std::ptrdiff_t, 2> strides{rows == 1 ? 0 : row_stride, cols == 1 ? 0 : col_stride};
  // xtensor calls the number of elements the size of the buffer, also where strides reach further.
  const auto size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  return xt::adapt(data, size, xt::no_ownership(), shape, strides);
}

// Sizes and strides of axes [first, first + 2) of an xtensor container, checked to fit index_t columns.
template <class X>
auto xtensor_axes(X& x, std::size_t first) {
  struct Axes {
    std::int64_t rows, cols, row_stride, col_stride;
  };
  const Axes a{static_cast<std::int64_t>(x.shape()[first]), static_cast<std::int64_t>(x.shape()[first + 1]),
               static_cast<std::int64_t>(x.strides()[first]), static_cast<std::int64_t>(x.strides()[first + 1])};
  if (a.cols > std::numeric_limits<index_t>::max())
    fail_argument("xtensor view: ", a.cols, " columns; at most ", std::numeric_limits<index_t>::max(), " are legal");
  return a;
}
}  // namespace detail

// A two-dimensional xtensor view [rows][cols]. Throws std::invalid_argument for rows in blocks, which have no stride,
// and for negative strides.
template <class T>
auto as_xtensor(Rows<T> rows) {
  if (rows.blocks) fail_argument("as_xtensor: rows lie in blocks; copy them to dense rows first");
  if (rows.row_stride < 0 || rows.col_stride < 0)
    fail_argument("as_xtensor: strides ", rows.row_stride, ", ", rows.col_stride, "; from 0 on are legal");
  return detail::xtensor_view(rows.data, rows.rows, rows.cols, rows.row_stride, rows.col_stride);
}
template <class T>
auto as_xtensor(Matrix<T> matrix) {
  return detail::xtensor_view(matrix.data, matrix.rows, matrix.cols, matrix.row_stride, 1);
}

// An xtensor container, adaptor or strided view with memory behind it.
template <class X>
concept XtensorMemory = requires(X& x) {
  x.dimension();
  x.strides();
  x.data() + x.data_offset();
};

// Rows of a two-dimensional xtensor container or strided view, of any layout. Throws std::invalid_argument for another
// number of dimensions.
template <XtensorMemory X>
auto rows_of(X& x) {
  if (x.dimension() != 2) fail_argument("rows_of: ", x.dimension(), " dimensions; [row][column] is required");
  const auto a = detail::xtensor_axes(x, 0);
  auto* data = x.data() + x.data_offset();
  return Rows<std::remove_pointer_t<decltype(data)>>{data, a.rows, static_cast<index_t>(a.cols), a.row_stride,
                                                     a.col_stride};
}
// Rows of one head of a three-dimensional container [head][token][dim].
template <XtensorMemory X>
auto rows_of(X& x, index_t head) {
  if (x.dimension() != 3) fail_argument("rows_of: ", x.dimension(), " dimensions; [head][token][dim] is required");
  if (head < 0 || static_cast<std::size_t>(head) >= x.shape()[0])
    fail_argument("rows_of: head ", head, " of ", x.shape()[0]);
  const auto a = detail::xtensor_axes(x, 1);
  auto* data =
      x.data() + x.data_offset() + static_cast<std::ptrdiff_t>(head) * static_cast<std::ptrdiff_t>(x.strides()[0]);
  return Rows<std::remove_pointer_t<decltype(data)>>{data, a.rows, static_cast<index_t>(a.cols), a.row_stride,
                                                     a.col_stride};
}
// A row-major matrix. Throws std::invalid_argument where the columns of a row do not lie one after the other.
template <XtensorMemory X>
auto matrix_of(X& x) {
  return detail::row_major(rows_of(x));
}
// A view of something that ends with this statement.
template <XtensorMemory X>
requires(!std::is_lvalue_reference_v<X>) void rows_of(X&&, index_t = 0) = delete;
template <XtensorMemory X>
requires(!std::is_lvalue_reference_v<X>) void matrix_of(X&&) = delete;

}  // namespace kvevict::inline KVEVICT_ABI
