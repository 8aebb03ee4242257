// Eigen maps of our rows and matrices, and our views of theirs. Nothing is copied: both sides see the same memory,
// which must outlive the views.
#pragma once
#include <Eigen/Core>
#include <concepts>
#include <limits>
#include <type_traits>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/interop/row_major.hpp"

namespace kvevict::inline KVEVICT_ABI {

template <class T>
using EigenRowMajor = Eigen::Matrix<std::remove_const_t<T>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// What the maps below are: rows with any strides, and matrices whose columns lie one after the other.
template <class T>
using EigenRows = Eigen::Map<std::conditional_t<std::is_const_v<T>, const EigenRowMajor<T>, EigenRowMajor<T>>,
                             Eigen::Unaligned, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>>;
template <class T>
using EigenMatrix = Eigen::Map<std::conditional_t<std::is_const_v<T>, const EigenRowMajor<T>, EigenRowMajor<T>>,
                               Eigen::Unaligned, Eigen::OuterStride<>>;

// [rows][cols]. Throws std::invalid_argument for rows in blocks, which have no stride.
template <class T>
EigenRows<T> as_eigen(Rows<T> rows) {
  static_assert(std::is_arithmetic_v<T>, "fp16_t and bf16_t hold bits; convert them before computing");
  if (rows.blocks) fail_argument("as_eigen: rows lie in blocks; copy them to dense rows first");
  return {rows.data, rows.rows, rows.cols, {rows.row_stride, rows.col_stride}};
}
template <class T>
EigenMatrix<T> as_eigen(Matrix<T> matrix) {
  static_assert(std::is_arithmetic_v<T>, "fp16_t and bf16_t hold bits; convert them before computing");
  return {matrix.data, matrix.rows, matrix.cols, Eigen::OuterStride<>(matrix.row_stride)};
}

// An Eigen matrix, array, map or block with memory behind it; a temporary only where it is itself a view.
template <class M, class D = std::remove_cvref_t<M>>
concept EigenMemory = std::derived_from<D, Eigen::DenseBase<D>> && requires(const D& m) {
  m.data();
  m.rowStride();
} &&(std::is_lvalue_reference_v<M> || !std::derived_from<D, Eigen::PlainObjectBase<D>>);

// Its rows, whether it is row-major or column-major.
template <EigenMemory M>
auto rows_of(M&& m) {
  if (m.cols() > std::numeric_limits<index_t>::max())
    fail_argument("rows_of: ", m.cols(), " columns; at most ", std::numeric_limits<index_t>::max(), " are legal");
  auto* data = m.data();
  return Rows<std::remove_pointer_t<decltype(data)>>{data, m.rows(), static_cast<index_t>(m.cols()), m.rowStride(),
                                                     m.colStride()};
}
// A row-major matrix. Throws std::invalid_argument where the columns of a row do not lie one after the other.
template <EigenMemory M>
auto matrix_of(M&& m) {
  return detail::row_major(rows_of(m));
}

}  // namespace kvevict::inline KVEVICT_ABI
