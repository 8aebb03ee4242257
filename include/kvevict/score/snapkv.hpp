// The observation-window scorer of SnapKV (arXiv 2404.14469) with every variant in use as a parameter: a token scores
// by the attention that the newest `window` prompt queries pay to it.
//
//   A = softmax(q . k * softmax_scale) over all keys that the query row sees by position, in float32
//   s_j = sum or mean over the window rows of A_ij, for the tokens before the window
//   pooling along the tokens and reduction over the query heads of a KV head, in either order
//
// The mass on the window itself is part of the softmax but not of the scores, so scores sum up to less than one per
// row.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

#include "kvevict/core/error.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/score/concepts.hpp"
#include "kvevict/score/group.hpp"
#include "kvevict/score/pooling.hpp"

namespace kvevict::inline KVEVICT_ABI {

enum class RowReduction { sum, mean };  // over the window's query rows
constexpr auto words_of(RowReduction) noexcept { return std::to_array<std::string_view>({"sum", "mean"}); }

enum class PoolOrder { group_then_pool, pool_then_group };
constexpr auto words_of(PoolOrder) noexcept {
  return std::to_array<std::string_view>({"group-then-pool", "pool-then-group"});
}

namespace score {

struct SnapKV {
  static constexpr std::string_view name = "snapkv";
  // Takes extras.lse where it is given.
  static constexpr Needs needs = Needs::keys | Needs::window_queries | Needs::softmax_scale;
  static constexpr bool heads_comparable = true;  // attention masses

  index_t window = 32;  // newest queries to look with; a head of t tokens uses min(window, max(1, t / 2))
  RowReduction rows = RowReduction::mean;
  Pooling pool = Pooling::max(7);
  GroupReduction group = GroupReduction::mean;
  PoolOrder order = PoolOrder::group_then_pool;  // of group reduction and pooling
  ProtectShare protect = ProtectShare::half;     // score: window and sinks get the layer's largest score + 1
  index_t sinks = 0;
  // Bytes of working memory per thread on the host; 0: no limit. Where one head's [window * group][tokens] floats do
  // not fit, the products are computed twice instead of being stored, with equal results. What two passes need is taken
  // anyway.
  std::int64_t scratch_limit = 0;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("window", self.window);
    visit("rows", self.rows);
    visit("pool", self.pool);
    visit("group", self.group);
    visit("order", self.order);
    visit("protect", self.protect);
    visit("sinks", self.sinks);
    visit("scratch_limit", self.scratch_limit);
  }

  index_t window_rows() const noexcept { return window; }
  Protect protection() const noexcept { return {sinks, window, protect}; }
  index_t score_heads(const CacheShape& shape) const noexcept {
    return group == GroupReduction::none ? shape.q_heads : shape.kv_heads;
  }

  // Throws std::invalid_argument unless every parameter is legal.
  void check() const {
    if (window < 1) fail_argument(name, ": window=", window, "; at least 1 is required");
    if (sinks < 0) fail_argument(name, ": sinks=", sinks, "; at least 0 is required");
    if (scratch_limit < 0) fail_argument(name, ": scratch_limit=", scratch_limit, "; 0 (no limit) or more is required");
    check_pooling(pool);
  }
};

}  // namespace score

}  // namespace kvevict::inline KVEVICT_ABI
