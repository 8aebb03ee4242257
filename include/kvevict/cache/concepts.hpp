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

namespace kvevict {

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

// The rows one layer keeps: CSR over its heads; rows ascending and unique inside a head.
struct HeadRows {
  std::span<const std::int64_t> offsets;  // [kv_heads + 1], not necessarily from 0
  std::span<const index_t> rows;          // indexed by offsets

  // Kept rows of one head.
  std::span<const index_t> head(index_t h) const {
    const auto first = static_cast<std::size_t>(offsets[static_cast<std::size_t>(h)]);
    return rows.subspan(first, static_cast<std::size_t>(offsets[static_cast<std::size_t>(h) + 1]) - first);
  }
};

// Row `from` is folded into row `into` of the same head with this weight: numbers before compaction.
struct Merge {
  index_t head, from, into;
  float weight;
};

struct LayerPlan {
  HeadRows keep;
  std::span<const Merge> merges;  // empty for policies that only drop
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

}  // namespace kvevict
