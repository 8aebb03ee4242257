// y = x W^T with frozen weights. W is stored once in panels of `panel` output columns, so that the kernel streams it
// without packing again for every call; a row of y depends on its row of x alone, whatever the number of rows, threads
// or the way the work is cut. That is why a chunked prefill, a prefill in one piece and a decoding step agree bit for
// bit in every product.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/vector.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Zeroed floats on a 64-byte boundary; can be resized, which loses the contents.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(std::size_t size) { resize(size); }
  void resize(std::size_t size) {
    if (size > capacity_) {
      memory_.reset();
      memory_.reset(static_cast<float*>(::operator new (size * sizeof(float), std::align_val_t{64})));
      capacity_ = size;
      std::fill_n(memory_.get(), size, 0.f);
    }
    size_ = size;
  }
  float* data() noexcept { return memory_.get(); }
  const float* data() const noexcept { return memory_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return capacity_ * sizeof(float); }

 private:
  struct Free {
    void operator()(float* p) const noexcept { ::operator delete (p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> memory_;
  std::size_t size_ = 0, capacity_ = 0;
};

namespace kernel {

inline constexpr auto panel = static_cast<index_t>(2 * simd::width);
// Rows of one register tile: with two vectors of columns and the operands they fill the register file.
inline constexpr int tile_rows = simd::registers == 32 ? 12 : simd::registers == 16 ? 6 : 2;

// c[rows][panel] (+)= a[rows][depth] * b[depth][panel]; each element is one chain of fused products in order of depth.
template <int rows>
void multiply_tile(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, index_t depth, float* c,
                   std::int64_t ldc, bool accumulate) {
  using namespace simd;
  Vec sum[rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = zero();
  for (index_t k = 0; k < depth; ++k, b += ldb) {
    const Vec left = load(b), right = load(b + width);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const Vec x = set(a[r * lda + k]);
      sum[r][0] = mul_add(left, x, sum[r][0]);
      sum[r][1] = mul_add(right, x, sum[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
    float* out = c + r * ldc;
    if (accumulate) {
      sum[r][0] = add(sum[r][0], load(out));
      sum[r][1] = add(sum[r][1], load(out + width));
    }
    store(sum[r][0], out);
    store(sum[r][1], out + width);
  }
}

template <int rows = tile_rows>
void multiply_rows(index_t count, const float* a, std::int64_t lda, const float* b, std::int64_t ldb, index_t depth,
                   float* c, std::int64_t ldc, bool accumulate) {
  if constexpr (rows > 1) {
    if (count < rows) return multiply_rows<rows - 1>(count, a, lda, b, ldb, depth, c, ldc, accumulate);
  }
  multiply_tile<rows>(a, lda, b, ldb, depth, c, ldc, accumulate);
}

// Any number of rows, cut into tiles of nearly equal height (a single left-over row would waste its panel loads).
inline void multiply_panel(index_t rows, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                           index_t depth, float* c, std::int64_t ldc, bool accumulate) {
  for (index_t tiles = (rows + tile_rows - 1) / tile_rows, r = 0; tiles > 0; --tiles) {
    const index_t height = (rows - r + tiles - 1) / tiles;
    multiply_rows(height, a + r * lda, lda, b, ldb, depth, c + r * ldc, ldc, accumulate);
    r += height;
  }
}

}  // namespace kernel

// W [outputs][inputs] in panels: element (o, i) lies at ((o / panel) * inputs + i) * panel + o % panel.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  PackedMatrix(index_t outputs, index_t inputs)
      : outputs_(outputs), inputs_(inputs), data_(static_cast<std::size_t>(panels()) * panel_size()) {}

  index_t outputs() const noexcept { return outputs_; }
  index_t inputs() const noexcept { return inputs_; }
  std::size_t bytes() const noexcept { return data_.bytes(); }

  // Sets row o from inputs() values.
  template <class Value>
  void set_row(index_t o, Value&& value) {
    float* p = data_.data() + offset(o);
    for (index_t i = 0; i < inputs_; ++i) p[std::int64_t{i} * kernel::panel] = value(i);
  }
  // Copies row o to out [inputs].
  void row(index_t o, float* out) const {
    const float* p = data_.data() + offset(o);
    for (index_t i = 0; i < inputs_; ++i) out[i] = p[std::int64_t{i} * kernel::panel];
  }
  // W^T, for products with W itself (gradients of inputs).
  PackedMatrix transposed() const {
    PackedMatrix out(inputs_, outputs_);
    for (index_t o = 0; o < outputs_; ++o) {
      const float* p = data_.data() + offset(o);
      for (index_t i = 0; i < inputs_; ++i)
        out.data_.data()[out.offset(i) + std::int64_t{o} * kernel::panel] = p[std::int64_t{i} * kernel::panel];
    }
    return out;
  }

  // y (+)= x W^T (+ bias): x [n][inputs], y [n][outputs], bias [outputs] or empty. O(n * inputs * outputs).
  void multiply(const host_exec& exec, Matrix<const float> x, std::span<const float> bias, Matrix<float> y,
                bool accumulate = false) const;

 private:
  // Products longer than this are summed in pieces, so that a panel stays in the second-level cache.
  static constexpr index_t depth_block = 2048;
  static constexpr std::int64_t group_bytes = 256 * 1024;

  index_t panels() const noexcept { return (outputs_ + kernel::panel - 1) / kernel::panel; }
  std::size_t panel_size() const noexcept { return static_cast<std::size_t>(inputs_) * kernel::panel; }
  std::int64_t offset(index_t o) const noexcept {
    return std::int64_t{o / kernel::panel} * inputs_ * kernel::panel + o % kernel::panel;
  }
  void multiply_block(Matrix<const float> x, std::span<const float> bias, Matrix<float> y, bool accumulate,
                      index_t first_row, index_t rows, index_t p) const;

  index_t outputs_ = 0, inputs_ = 0;
  FloatBuffer data_;
};

inline void PackedMatrix::multiply_block(Matrix<const float> x, std::span<const float> bias, Matrix<float> y,
                                         bool accumulate, index_t first_row, index_t rows, index_t p) const {
  using kernel::panel;
  const index_t column = p * panel, width = std::min(panel, outputs_ - column);
  const float* w = data_.data() + static_cast<std::size_t>(p) * panel_size();
  constexpr index_t tail_rows = 48;
  float tail[tail_rows * panel];
  // The last panel may be padded: its columns beyond the output go through a buffer.
  const bool whole = width == panel;
  const index_t step = whole ? rows : tail_rows;
  for (index_t r = 0; r < rows; r += step) {
    const index_t count = std::min(step, rows - r);
    float* out = y.row(first_row + r) + column;
    const std::int64_t stride = whole ? y.row_stride : panel;
    float* c = whole ? out : tail;
    if (!whole && accumulate)
      for (index_t i = 0; i < count; ++i) std::copy_n(out + i * y.row_stride, width, tail + i * panel);
    for (index_t k = 0; k < inputs_; k += depth_block)
      kernel::multiply_panel(count, x.row(first_row + r) + k, x.row_stride, w + std::int64_t{k} * panel, panel,
                             std::min(depth_block, inputs_ - k), c, stride, accumulate || k > 0);
    if (!bias.empty())
      for (index_t i = 0; i < count; ++i)
        for (index_t j = 0; j < width; ++j) c[i * stride + j] += bias[static_cast<std::size_t>(column + j)];
    if (!whole)
      for (index_t i = 0; i < count; ++i) std::copy_n(tail + i * panel, width, out + i * y.row_stride);
  }
}

inline void PackedMatrix::multiply(const host_exec& exec, Matrix<const float> x, std::span<const float> bias,
                                   Matrix<float> y, bool accumulate) const {
  if (x.cols != inputs_ || y.cols != outputs_ || x.rows != y.rows)
    fail_argument("PackedMatrix: x [", x.rows, ", ", x.cols, "] and y [", y.rows, ", ", y.cols, "] do not fit W [",
                  outputs_, ", ", inputs_, "]");
  const std::int64_t panel_bytes = static_cast<std::int64_t>(panel_size() * sizeof(float));
  const auto group = static_cast<index_t>(std::clamp<std::int64_t>(group_bytes / panel_bytes, 1, 16));
  const index_t groups = (panels() + group - 1) / group;
  // Rows are cut only where there are too few panel groups to share.
  const index_t wanted = groups >= 3 * exec.threads ? 1 : (3 * exec.threads + groups - 1) / groups;
  const index_t row_blocks = std::clamp<index_t>(x.rows / (4 * kernel::tile_rows), 1, wanted);
  const index_t block = (x.rows + row_blocks - 1) / std::max(row_blocks, 1);
  constexpr index_t slice = 8 * kernel::tile_rows;  // rows that stay in cache while the panels of a group pass by
  parallel_for(exec, std::int64_t{groups} * row_blocks, [&](std::int64_t item) {
    const auto g = static_cast<index_t>(item / row_blocks), b = static_cast<index_t>(item % row_blocks);
    const index_t end = std::min(x.rows, (b + 1) * block), last = std::min(panels(), (g + 1) * group);
    for (index_t r = b * block; r < end; r += slice)
      for (index_t p = g * group; p < last; ++p) multiply_block(x, bias, y, accumulate, r, std::min(slice, end - r), p);
  });
}

}  // namespace kvevict::inline KVEVICT_ABI
