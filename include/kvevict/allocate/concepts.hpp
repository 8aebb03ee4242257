// What an allocator is: it gives each head of each layer its rows. Three kinds:
//   static   from the shape and the token counts alone,
//   layer    from one layer's scores, inside a layer total that it fixes beforehand,
//   global   from the scores of every layer.
// A layer allocator is lifted from a static one: Ada<Pyramid> splits the layer totals that Pyramid gives. All three are
// data and rules: where scores count, an allocator says how (score_split.hpp), and the backend does it. Token counts
// are those of the evictable range.
#pragma once
#include <concepts>
#include <cstdint>
#include <span>

#include "kvevict/allocate/score_split.hpp"
#include "kvevict/core/audit.hpp"
#include "kvevict/core/budget.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::inline KVEVICT_ABI {

// minimum_rows: rows per head that an allocator guarantees; 0 where empty heads are part of the method.
template <class A>
concept GuaranteesRows = std::copyable<A> && requires(const A& a) {
  { a.minimum_rows } -> std::convertible_to<index_t>;
};

// out: [layers][kv_heads], each at most the head's tokens. tokens: [layers * kv_heads].
template <class A>
concept StaticAllocator = GuaranteesRows<A> &&
    requires(const A& a, const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
             Matrix<index_t> out, Audit& audit) {
  { a.allocate(shape, tokens, budget, out, audit) } -> std::same_as<void>;
};

// layer_totals fills [layers]; split_layer then says how heads share one of them that is less than they hold.
// Optional, for rules that no ranking expresses:
//   bool counts_by_rule() const
//   void apply_rule(heads, total, span<index_t> rows, audit) const    changes the counted rows [heads]; host only
template <class A>
concept LayerAllocator = GuaranteesRows<A> &&
    requires(const A& a, const CacheShape& shape, std::span<const index_t> tokens, const GrantedBudget& budget,
             std::span<std::int64_t> totals, const SharingHeads& heads, std::int64_t total, Audit& audit) {
  { a.layer_totals(shape, tokens, budget, totals, audit) } -> std::same_as<void>;
  { a.split_layer(heads, total) } -> std::same_as<ScoreSplit>;
};

// heads: those of all layers, [layers * kv_heads].
template <class A>
concept GlobalAllocator = GuaranteesRows<A> && requires(const A& a, const SharingHeads& heads, std::int64_t total) {
  { a.split_all(heads, total) } -> std::same_as<ScoreSplit>;
};

template <class A>
concept Allocator = StaticAllocator<A> || LayerAllocator<A> || GlobalAllocator<A>;

enum class AllocatorKind { fixed, layer, global };  // static, per layer, over all layers

// The kind is a property of the type, or of the value where the type is erased.
template <Allocator A>
AllocatorKind kind_of(const A& allocator) {
  if constexpr (requires { allocator.kind(); }) return allocator.kind();
  else if constexpr (GlobalAllocator<A>) return AllocatorKind::global;
  else if constexpr (LayerAllocator<A>) return AllocatorKind::layer;
  else return AllocatorKind::fixed;
}

// Whether the rows that a backend counted go through apply_rule().
template <class A>
bool counts_by_rule(const A& allocator) {
  if constexpr (requires { allocator.counts_by_rule(); }) return allocator.counts_by_rule();
  else return false;
}

}  // namespace kvevict::inline KVEVICT_ABI
