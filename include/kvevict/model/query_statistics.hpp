// Mean and covariance of pre-RoPE queries per query head: what Expected Attention predicts future queries from.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvevict/core/error.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/parallel.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Sums in double, in order of the tokens, so that chunks of any size give the same bits. O(tokens * head_dim^2) a head.
class QueryStatistics {
 public:
  QueryStatistics() = default;
  QueryStatistics(index_t q_heads, index_t head_dim)
      : heads_(q_heads),
        dim_(head_dim),
        sums_(static_cast<std::size_t>(q_heads) * stride()),
        mean_(static_cast<std::size_t>(q_heads) * static_cast<std::size_t>(head_dim)),
        covariance_(mean_.size() * static_cast<std::size_t>(head_dim)) {}

  void clear() {
    count_ = 0;
    std::fill(sums_.begin(), sums_.end(), 0.);
  }
  // queries [tokens][q_heads * head_dim]; rows before `first` are left out.
  void add(const host_exec& exec, Matrix<const float> queries, index_t first = 0) {
    if (first >= queries.rows) return;
    count_ += queries.rows - first;
    parallel_for(exec, heads_, [&](std::int64_t h) {
      double* sum = sums_.data() + static_cast<std::size_t>(h) * stride();
      double* products = sum + dim_;
      std::vector<double> x(static_cast<std::size_t>(dim_));
      for (index_t r = first; r < queries.rows; ++r) {
        const float* q = queries.row(r) + h * dim_;
        std::copy_n(q, dim_, x.begin());
        for (index_t a = 0; a < dim_; ++a) {
          const double xa = x[static_cast<std::size_t>(a)];
          sum[a] += xa;
          for (index_t b = 0; b <= a; ++b) products[a * dim_ + b] += xa * x[static_cast<std::size_t>(b)];
        }
      }
    });
  }
  index_t count() const noexcept { return count_; }
  // Makes mean() and covariance() (divisor N) of what was added. Throws std::invalid_argument for no rows.
  void finish() {
    if (count_ == 0) fail_argument("query statistics: no token was left to look at; at least 1 is required");
    for (index_t h = 0; h < heads_; ++h) {
      const double* sum = sums_.data() + static_cast<std::size_t>(h) * stride();
      float* mean = mean_.data() + std::int64_t{h} * dim_;
      float* covariance = covariance_.data() + std::int64_t{h} * dim_ * dim_;
      for (index_t a = 0; a < dim_; ++a) {
        mean[a] = static_cast<float>(sum[a] / count_);
        for (index_t b = 0; b <= a; ++b) {
          const double c = sum[dim_ + a * dim_ + b] / count_ - sum[a] / count_ * (sum[b] / count_);
          covariance[a * dim_ + b] = covariance[b * dim_ + a] = static_cast<float>(c);
        }
      }
    }
  }
  std::span<const float> mean() const noexcept { return mean_; }              // [q_heads][head_dim]
  std::span<const float> covariance() const noexcept { return covariance_; }  // [q_heads][head_dim][head_dim]

 private:
  std::size_t stride() const noexcept { return static_cast<std::size_t>(dim_) * (static_cast<std::size_t>(dim_) + 1); }

  index_t heads_ = 0, dim_ = 0, count_ = 0;
  std::vector<double> sums_;  // [q_heads] of sum [dim], products [dim][dim] (lower half)
  std::vector<float> mean_, covariance_;
};

}  // namespace kvevict::inline KVEVICT_ABI
