#include <doctest/doctest.h>

#include <Eigen/Core>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvevict/interop/eigen.hpp"
#include "kvevict/interop/xtensor.hpp"

using namespace kvevict;

namespace {
// 3 rows of 2 columns inside rows of 4 elements, every second element: 0 2 | 4 6 | 8 10.
struct Strided {
  std::vector<float> memory{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  Rows<float> rows{memory.data(), 3, 2, 4, 2};
};
template <class M>
concept HasRows = requires(M m) {
  rows_of(std::forward<M>(m));
};
}  // namespace

TEST_CASE("Eigen sees our rows where they lie, whatever their strides") {
  Strided s;
  auto map = as_eigen(s.rows);
  CHECK(map.rows() == 3);
  CHECK(map.cols() == 2);
  CHECK(map(2, 1) == 10);
  map(1, 0) = -1;
  CHECK(s.memory[4] == -1);
  CHECK(as_eigen(Rows<const float>(s.rows)).row(0).sum() == 2);

  const Matrix<float> matrix{s.memory.data(), 2, 3, 5};
  auto m = as_eigen(matrix);
  CHECK(m(1, 2) == 7);
  m(1, 2) = 70;
  CHECK(s.memory[7] == 70);
}

TEST_CASE("we see Eigen's matrices where they lie, in either order") {
  Eigen::MatrixXf columns(2, 3);
  columns << 1, 2, 3, 4, 5, 6;
  const auto rows = rows_of(columns);
  static_assert(std::is_same_v<decltype(rows), const Rows<float>>);
  CHECK(rows.at(1, 0) == 4);
  CHECK(rows.at(0, 2) == 3);
  rows.at(1, 1) = 50;
  CHECK(columns(1, 1) == 50);
  static_assert(std::is_same_v<decltype(rows_of(std::as_const(columns))), Rows<const float>>);

  const auto block = rows_of(columns.block(0, 1, 2, 2));  // a view of memory that lives
  CHECK(block.at(1, 1) == 6);
  CHECK(block.data == &columns(0, 1));

  EigenRowMajor<float> row_major = columns;
  const auto matrix = matrix_of(row_major);
  CHECK(matrix.at(1, 2) == 6);
  CHECK(matrix.data == row_major.data());
  CHECK_THROWS_AS(matrix_of(columns), std::invalid_argument);  // its columns lie apart
}

TEST_CASE("xtensor sees our rows where they lie, whatever their strides") {
  Strided s;
  auto view = as_xtensor(s.rows);
  CHECK(view.shape()[0] == 3);
  CHECK(view(2, 1) == 10);
  view(1, 0) = -1;
  CHECK(s.memory[4] == -1);
  const xt::xarray<float> copy = view + 1;
  CHECK(copy(2, 1) == 11);
  CHECK(copy(1, 0) == 0);
  const auto constant = as_xtensor(Rows<const float>(s.rows));
  CHECK(constant(1, 1) == 6);
  const auto matrix = as_xtensor(Matrix<const float>{s.memory.data(), 2, 3, 5});
  CHECK(matrix(1, 2) == 7);
  CHECK(as_xtensor(Rows<float>{s.memory.data(), 1, 3, 3})(0, 2) == 2);  // a single row
  CHECK(as_xtensor(Rows<float>{s.memory.data(), 0, 3, 3}).size() == 0);
}

TEST_CASE("we see xtensor's arrays where they lie") {
  xt::xarray<float> a{{1, 2, 3}, {4, 5, 6}};
  const auto rows = rows_of(a);
  CHECK(rows.at(1, 0) == 4);
  rows.at(1, 0) = 40;
  CHECK(a(1, 0) == 40);
  static_assert(std::is_same_v<decltype(rows_of(std::as_const(a))), Rows<const float>>);
  CHECK(matrix_of(a).at(0, 2) == 3);

  xt::xarray<float, xt::layout_type::column_major> columns{{1, 2, 3}, {4, 5, 6}};
  CHECK(rows_of(columns).at(1, 0) == 4);
  CHECK_THROWS_AS(matrix_of(columns), std::invalid_argument);

  xt::xarray<float> heads{{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}};
  CHECK(rows_of(heads, 1).at(0, 1) == 6);
  CHECK_THROWS_AS(rows_of(heads, 2), std::invalid_argument);
  CHECK_THROWS_AS(rows_of(heads, -1), std::invalid_argument);
  CHECK_THROWS_AS(rows_of(heads), std::invalid_argument);
  CHECK_THROWS_AS(rows_of(a, 0), std::invalid_argument);

  // One row: xtensor gives its axis the stride 0.
  xt::xarray<float> one{{1, 2, 3}};
  CHECK(rows_of(one).at(0, 2) == 3);
}

TEST_CASE("rows in blocks have no stride and cannot be viewed") {
  std::vector<float> memory(8);
  const index_t blocks[] = {1, 0};
  const Rows<float> rows{memory.data(), 4, 2, 2, 1, blocks, 2, 4};
  CHECK_THROWS_AS(as_eigen(rows), std::invalid_argument);
  CHECK_THROWS_AS(as_xtensor(rows), std::invalid_argument);
}

TEST_CASE("views of what ends with the statement do not compile") {
  CHECK(HasRows<Eigen::MatrixXf&>);
  CHECK(HasRows<const Eigen::MatrixXf&>);
  CHECK_FALSE(HasRows<Eigen::MatrixXf>);
  CHECK(HasRows<xt::xarray<float>&>);
  CHECK_FALSE(HasRows<xt::xarray<float>>);
}
