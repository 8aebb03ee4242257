// The error for a NaN score, which cannot be ranked.
#pragma once
#include <stdexcept>
#include <string>

#include "kvevict/core/error.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Its row (0 where there is one row only) and its index there. Planners turn it into a message that names policy,
// layer, head and token.
struct NanScore : std::domain_error {
  index_t row, token;
  NanScore(index_t at_row, index_t at_token)
      : NanScore(
            at_row, at_token,
            joined_text("NaN score in row ", at_row, ", token ", at_token, "; a number or an infinity is required")) {}
  // From a scorer that notices: row is the head.
  NanScore(index_t at_row, index_t at_token, const std::string& words)
      : std::domain_error(words), row(at_row), token(at_token) {}
};

namespace detail {

// Runs f(), which ranks one row and knows it as row 0; a NaN score leaves with the number of the row.
template <class F>
decltype(auto) ranking_row(index_t row, F&& f) {
  try {
    return f();
  } catch (const NanScore& nan) {
    throw NanScore(row, nan.token);
  }
}

}  // namespace detail
}  // namespace kvevict::inline KVEVICT_ABI
