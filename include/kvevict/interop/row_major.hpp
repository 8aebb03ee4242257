// The check behind matrix_of() of both libraries: the rows must be row-major.
#pragma once
#include <limits>

#include "kvevict/core/error.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Throws std::invalid_argument where the columns of a row do not lie one after the other.
template <class T>
Matrix<T> row_major(const Rows<T>& rows) {
  if (rows.cols > 1 && rows.col_stride != 1)
    fail_argument("matrix_of: column stride ", rows.col_stride, "; a row-major layout (stride 1) is required");
  if (rows.rows > std::numeric_limits<index_t>::max())
    fail_argument("matrix_of: ", rows.rows, " rows; at most ", std::numeric_limits<index_t>::max(), " are legal");
  return {rows.data, static_cast<index_t>(rows.rows), rows.cols, rows.row_stride};
}

}  // namespace kvevict::inline KVEVICT_ABI::detail
