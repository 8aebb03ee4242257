// Non-owning views: the rows of one (layer, head), and a plain row-major matrix. Plain data, usable in device code.
#pragma once
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "kvevict/config.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Rows of one (layer, head): dense, strided, transposed or in blocks. Strides count elements.
// With a block table, row r lies in block blocks[r / block_rows] at offset (r % block_rows) * row_stride.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t rows = 0;
  index_t cols = 0;
  std::int64_t row_stride = 0, col_stride = 1;
  const index_t* blocks = nullptr;  // [ceil(rows / block_rows)], or null: rows lie row_stride apart
  index_t block_rows = 0;
  std::int64_t block_stride = 0;

  KVEVICT_HOST_DEVICE constexpr T* row(std::int64_t r) const noexcept {
    return blocks ? data + blocks[r / block_rows] * block_stride + (r % block_rows) * row_stride
                  : data + r * row_stride;
  }
  KVEVICT_HOST_DEVICE constexpr T& at(std::int64_t r, std::int64_t c) const noexcept { return row(r)[c * col_stride]; }
  // A read-only view of the same rows.
  template <class U>
  requires(!std::is_const_v<T> && std::same_as<U, const T>) KVEVICT_HOST_DEVICE constexpr operator Rows<U>()
      const noexcept {
    return {data, rows, cols, row_stride, col_stride, blocks, block_rows, block_stride};
  }
};

// Rows that lie one after the other: [rows][cols].
template <class T>
KVEVICT_HOST_DEVICE constexpr Rows<T> dense_rows(T* data, std::int64_t rows, index_t cols) noexcept {
  return {data, rows, cols, cols};
}

// Row-major matrix; row_stride >= cols.
template <class T>
struct Matrix {
  T* data = nullptr;
  index_t rows = 0, cols = 0;
  std::int64_t row_stride = 0;

  KVEVICT_HOST_DEVICE constexpr T* row(index_t r) const noexcept { return data + r * row_stride; }
  KVEVICT_HOST_DEVICE constexpr T& at(index_t r, index_t c) const noexcept { return row(r)[c]; }
  template <class U>
  requires(!std::is_const_v<T> && std::same_as<U, const T>) KVEVICT_HOST_DEVICE constexpr operator Matrix<U>()
      const noexcept {
    return {data, rows, cols, row_stride};
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
