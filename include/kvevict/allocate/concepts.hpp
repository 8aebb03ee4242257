// What an allocator is: it gives each head of each layer its rows. Three kinds:
//   static   from the shape and the token counts alone,
//   layer    from one layer's scores, inside a layer total that it fixes beforehand,
//   global   from the scores of every layer.
// A layer allocator is lifted from a static one: Ada<Pyramid> splits the layer totals that Pyramid gives.
#pragma once
#include <concepts>
#include <cstdint>
#include <span>

#include "kvevict/core/audit.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/exec.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// One layer's scores as allocators see them.
struct LayerScores {
  index_t layer = 0;
  Matrix<const float> scores;       // [kv_heads][most tokens of a head]
  std::span<const index_t> tokens;  // [kv_heads]
  Protect protect;                  // as the scorer asks
  bool comparable = false;          // scores of different heads may be compared as they are
};

// minimum_rows: rows per head that an allocator guarantees; 0 where empty heads are part of the method.
template <class A>
concept AnyKindOfAllocator = std::copyable<A> && requires(const A& a) {
  { a.minimum_rows } -> std::convertible_to<index_t>;
};

// out: [layers][kv_heads], each at most the head's tokens. tokens: [layers * kv_heads].
template <class A>
concept StaticAllocator = AnyKindOfAllocator<A> &&
    requires(const A& a, const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
             Matrix<index_t> out, Audit& audit) {
  { a.allocate(shape, tokens, budget, out, audit) } -> std::same_as<void>;
};

// layer_totals fills [layers]; allocate_layer then splits one of them over [kv_heads].
template <class A>
concept LayerAllocator = AnyKindOfAllocator<A> &&
    requires(const A& a, const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
             std::span<std::int64_t> totals, const host_exec& exec, const LayerScores& scores, std::int64_t total,
             std::span<index_t> out, Audit& audit) {
  { a.layer_totals(shape, tokens, budget, totals, audit) } -> std::same_as<void>;
  { a.allocate_layer(exec, scores, total, out, audit) } -> std::same_as<void>;
};

// layers: [layers]; out: [layers][kv_heads].
template <class A>
concept GlobalAllocator = AnyKindOfAllocator<A> &&
    requires(const A& a, const host_exec& exec, std::span<const LayerScores> layers, const GrantedBudget& budget,
             Matrix<index_t> out, Audit& audit) {
  { a.allocate_all(exec, layers, budget, out, audit) } -> std::same_as<void>;
};

// What the selector has to protect in a head: what the scorer asks for, unless the layer allocator says less in an
// optional member head_protection(scores, total, head). Only tokens, protect and layer of `scores` are read.
template <class A>
Protect protection_in_head(const A& allocator, const LayerScores& scores, std::int64_t total, index_t head) {
  if constexpr (requires { allocator.head_protection(scores, total, head); })
    return allocator.head_protection(scores, total, head);
  else return scores.protect;
}

template <class A>
concept Allocator = StaticAllocator<A> || LayerAllocator<A> || GlobalAllocator<A>;

}  // namespace kvevict::inline KVEVICT_ABI
