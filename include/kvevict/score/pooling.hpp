// Pooling of score rows along the tokens: neighbours of an important token are kept with it (SnapKV, arXiv 2404.14469).
// Stride 1, an odd kernel N centred on the token, so that the row keeps its length:
//   avg:N  sum of the N neighbours / N; tokens outside the row count as 0 and stay in the divisor,
//   max:N  largest of the neighbours inside the row.
#pragma once
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "kvevict/config.hpp"
#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

struct Pooling {
  enum class Kind { none, avg, max };

  Kind kind = Kind::none;
  index_t kernel = 1;  // odd; without meaning where kind is none

  static constexpr Pooling none() noexcept { return {}; }
  static constexpr Pooling avg(index_t kernel) noexcept { return {Kind::avg, kernel}; }
  static constexpr Pooling max(index_t kernel) noexcept { return {Kind::max, kernel}; }

  // pool(a + b) = pool(a) + pool(b), so that it may trade places with a sum over heads.
  KVEVICT_HOST_DEVICE constexpr bool linear() const noexcept { return kind != Kind::max; }

  friend constexpr bool operator==(const Pooling&, const Pooling&) = default;
};

// Throws std::invalid_argument unless the kernel is odd and positive: an even one has no centre.
inline void check_pooling(const Pooling& p) {
  if (p.kind != Pooling::Kind::none && (p.kernel < 1 || p.kernel % 2 == 0))
    fail_argument("pool=", p.kind == Pooling::Kind::avg ? "avg:" : "max:", p.kernel,
                  ": the kernel must be odd and at least 1");
}

// "none", "avg:5", "max:7".
inline std::string print_value(const Pooling& p) {
  if (p.kind == Pooling::Kind::none) return "none";
  return (p.kind == Pooling::Kind::avg ? "avg:" : "max:") + std::to_string(p.kernel);
}

// False where the text is no pooling; an even or non-positive kernel throws std::invalid_argument.
inline bool parse_value(std::string_view s, Pooling& p) {
  if (s == "none") {
    p = {};
    return true;
  }
  const std::string_view kind = s.substr(0, std::min<std::size_t>(4, s.size()));
  if (kind != "avg:" && kind != "max:") return false;
  Pooling out{kind == "avg:" ? Pooling::Kind::avg : Pooling::Kind::max, 0};
  const auto [end, error] = std::from_chars(s.data() + 4, s.data() + s.size(), out.kernel);
  if (error != std::errc{} || end != s.data() + s.size()) return false;
  check_pooling(out);
  p = out;
  return true;
}

namespace detail {
inline constexpr std::size_t pool_chunk = 512;  // tokens pooled at a time: the chunk and its halo stay in the L1 cache

inline std::size_t pool_halo(const Pooling& p, std::size_t tokens) noexcept {
  return std::min(static_cast<std::size_t>(p.kernel / 2), tokens);  // what lies further out is padding alone
}
}  // namespace detail

// Floats of working memory that pool_row needs for a row of `tokens`.
inline std::size_t pool_scratch(const Pooling& p, std::size_t tokens) noexcept {
  if (p.kind == Pooling::Kind::none) return 0;
  return std::min(tokens, detail::pool_chunk) + 2 * detail::pool_halo(p, tokens);
}

// Pools `row` in place. scratch: pool_scratch(p, row.size()) floats. O(tokens * kernel).
inline void pool_row(const Pooling& p, std::span<float> row, std::span<float> scratch) {
  check_pooling(p);
  const std::size_t tokens = row.size();
  if (p.kind == Pooling::Kind::none || tokens == 0) return;
  const bool max = p.kind == Pooling::Kind::max;
  const float padding = max ? -std::numeric_limits<float>::infinity() : 0.f;
  const std::size_t halo = detail::pool_halo(p, tokens);
  float* const in = scratch.data();  // [halo][chunk][halo]: the row as it was, around the chunk
  std::fill_n(in, halo, padding);
  for (std::size_t first = 0; first < tokens; first += detail::pool_chunk) {
    const std::size_t count = std::min(detail::pool_chunk, tokens - first);
    const std::size_t behind = std::min(halo, tokens - first - count);
    std::copy_n(row.data() + first, count + behind, in + halo);
    std::fill_n(in + halo + count + behind, halo - behind, padding);
    float* const out = row.data() + first;
    std::copy_n(in, count, out);
    for (std::size_t o = 1; o <= 2 * halo; ++o) {
      const float* const shifted = in + o;
      if (max)
        for (std::size_t j = 0; j < count; ++j) out[j] = out[j] < shifted[j] ? shifted[j] : out[j];
      else
        for (std::size_t j = 0; j < count; ++j) out[j] += shifted[j];
    }
    if (!max)
      for (std::size_t j = 0; j < count; ++j) out[j] /= static_cast<float>(p.kernel);
    std::copy_n(in + count, halo, in);
  }
}

}  // namespace kvevict::inline KVEVICT_ABI
