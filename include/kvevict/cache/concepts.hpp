// What a cache is to this library: something that shows its rows (KVCacheView), and something that can drop rows and
// really become smaller (KVCache). Recorded dumps, foreign engines and our own caches all satisfy these.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/plan/layer_plan.hpp"

namespace kvevict::inline KVEVICT_ABI {

template <class C>
concept KVCacheView = requires(const C& c, index_t layer, index_t head) {
  typename C::element_type;  // float, fp16_t, bf16_t (storage only)
  typename C::memory_space;
  requires MemorySpace<typename C::memory_space>;
  { c.shape() } -> std::same_as<CacheShape>;
  { c.tokens(layer, head) } -> std::same_as<index_t>;  // may differ per head
  { c.keys(layer, head) } -> std::same_as<Rows<const typename C::element_type>>;
  { c.values(layer, head) } -> std::same_as<Rows<const typename C::element_type>>;
  { c.positions(layer, head) } -> std::same_as<std::span<const index_t>>;  // original positions, ascending
};

// A cache that owns its rows says so by refusing to show those of a temporary (`keys(...) const&& = delete`); for a
// plain view a temporary is as good as any.
template <class C>
concept OwningCache = KVCacheView<C> && !requires(const C&& temporary, index_t layer, index_t head) {
  static_cast<const C&&>(temporary).keys(layer, head);
};

template <class C, class Exec>
concept KVCache = KVCacheView<C> && requires(C& c, const C& view, const Exec& exec, index_t layer, LayerPlan plan) {
  // All heads of a layer at once; merges first, positions travel with their rows.
  { c.compact(exec, layer, plan) } -> std::same_as<void>;
  { view.bytes_live() } -> std::same_as<std::size_t>;      // keys and values of rows that exist
  { view.bytes_reserved() } -> std::same_as<std::size_t>;  // what is really held for them
  // What these rows per (layer, head), [layers * kv_heads], would take in this kind of cache.
  { C::bytes_for(CacheShape{}, std::span<const std::int64_t>{}) } -> std::same_as<std::size_t>;
};

template <class C, class Exec>
concept GrowingCache = KVCache<C, Exec> &&
    requires(C& c, const C& view, const Exec& exec, index_t layer,
             std::span<const Rows<const typename C::element_type>> rows, std::span<const index_t> positions) {
  // keys [kv_heads], values [kv_heads], one position per new row.
  { c.append(exec, layer, rows, rows, positions) } -> std::same_as<void>;
  { view.next_position() } -> std::same_as<index_t>;  // not the number of rows
};

}  // namespace kvevict::inline KVEVICT_ABI
