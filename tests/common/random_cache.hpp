// Random caches and plans for property tests: any element type, head dimensions and lengths; the same seed gives the
// same values on every platform.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvevict/cache/concepts.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"

namespace kvevict::testing {

// splitmix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [0, 1).
  float uniform() { return static_cast<float>(bits() >> 40) * 0x1p-24f; }
  // In [least, most].
  index_t integer(index_t least, index_t most) {
    return least + static_cast<index_t>(bits() % (static_cast<std::uint64_t>(most - least) + 1));
  }
  // Mean 0, variance 1, in (-3.5, 3.5): a sum of four uniforms.
  float normal() { return (uniform() + uniform() + uniform() + uniform() - 2.f) * 1.7320508f; }

 private:
  std::uint64_t state_;
};

template <CacheElement T>
std::vector<T> random_elements(std::size_t count, std::uint64_t seed, float scale = 1.f) {
  Random random(seed);
  std::vector<T> out(count);
  for (T& x : out) x = from_float<T>(scale * random.normal());
  return out;
}

// Rows per (layer, head), [layers * kv_heads].
inline std::vector<index_t> equal_lengths(const CacheShape& shape, index_t tokens) {
  return std::vector<index_t>(static_cast<std::size_t>(shape.heads_total()), tokens);
}
inline std::vector<index_t> ragged_lengths(const CacheShape& shape, index_t least, index_t most, std::uint64_t seed) {
  Random random(seed);
  std::vector<index_t> out(static_cast<std::size_t>(shape.heads_total()));
  for (index_t& t : out) t = random.integer(least, most);
  return out;
}

// The rows that a random cache is made of; itself a KVCacheView. Positions count up from 0; with gaps, each is 1 to 3
// past the one before, so that positions and row numbers differ.
template <CacheElement T>
class RandomRows {
 public:
  using element_type = T;
  using memory_space = host_space;

  RandomRows(const CacheShape& shape, const std::vector<index_t>& lengths, std::uint64_t seed, bool gaps = false)
      : shape_(shape) {
    Random random(seed);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto t = static_cast<std::size_t>(lengths[i]);
      Head head;
      head.keys = random_elements<T>(t * static_cast<std::size_t>(shape.head_dim_k), random.bits());
      head.values = random_elements<T>(t * static_cast<std::size_t>(shape.head_dim_v), random.bits());
      index_t position = 0;
      for (std::size_t r = 0; r < t; ++r, ++position) {
        if (gaps) position += random.integer(0, 2);
        head.positions.push_back(position);
      }
      heads_.push_back(std::move(head));
    }
  }

  CacheShape shape() const { return shape_; }
  index_t tokens(index_t layer, index_t head) const { return static_cast<index_t>(at(layer, head).positions.size()); }
  Rows<const T> keys(index_t layer, index_t head) const {
    return dense_rows(at(layer, head).keys.data(), tokens(layer, head), shape_.head_dim_k);
  }
  Rows<const T> values(index_t layer, index_t head) const {
    return dense_rows(at(layer, head).values.data(), tokens(layer, head), shape_.head_dim_v);
  }
  std::span<const index_t> positions(index_t layer, index_t head) const { return at(layer, head).positions; }

 private:
  struct Head {
    std::vector<T> keys, values;
    std::vector<index_t> positions;
  };
  const Head& at(index_t layer, index_t head) const { return heads_[static_cast<std::size_t>(shape_.at(layer, head))]; }

  CacheShape shape_;
  std::vector<Head> heads_;
};

// A random cache of type C<T>: random_cache<RaggedCache<fp16_t>>(shape, lengths, seed).
template <class C>
C random_cache(const CacheShape& shape, const std::vector<index_t>& lengths, std::uint64_t seed, bool gaps = false) {
  return C(RandomRows<typename C::element_type>(shape, lengths, seed, gaps));
}

// The owner of one layer's kept rows.
struct OwnedKeep {
  std::vector<std::int64_t> offsets{0};
  std::vector<index_t> rows;

  void add_head(const std::vector<index_t>& keep) {
    rows.insert(rows.end(), keep.begin(), keep.end());
    offsets.push_back(static_cast<std::int64_t>(rows.size()));
  }
  HeadRows view() const { return {offsets, rows}; }
};

// `count` random rows of `tokens`, ascending.
inline std::vector<index_t> random_subset(index_t tokens, index_t count, Random& random) {
  std::vector<index_t> out;
  for (index_t r = 0; r < tokens; ++r)
    if (random.integer(0, tokens - r - 1) < count - static_cast<index_t>(out.size())) out.push_back(r);
  return out;
}

// Random rows of each head of a layer: equal = every head keeps least; else each keeps between least and all.
template <KVCacheView C>
OwnedKeep random_keep(const C& cache, index_t layer, index_t least, bool equal, std::uint64_t seed) {
  Random random(seed);
  OwnedKeep out;
  for (index_t h = 0; h < cache.shape().kv_heads; ++h) {
    const index_t t = cache.tokens(layer, h);
    const index_t low = least < t ? least : t;
    out.add_head(random_subset(t, equal ? low : random.integer(low, t), random));
  }
  return out;
}

// One layer's new rows, for append.
template <CacheElement T>
class NewRows {
 public:
  NewRows(const CacheShape& shape, index_t first_position, index_t count, std::uint64_t seed) {
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      const auto n = static_cast<std::size_t>(count);
      const auto salt = 2 * static_cast<std::uint64_t>(h);
      key_data_.push_back(random_elements<T>(n * static_cast<std::size_t>(shape.head_dim_k), seed + salt));
      value_data_.push_back(random_elements<T>(n * static_cast<std::size_t>(shape.head_dim_v), seed + salt + 1));
      keys_.push_back(dense_rows<const T>(key_data_.back().data(), count, shape.head_dim_k));
      values_.push_back(dense_rows<const T>(value_data_.back().data(), count, shape.head_dim_v));
    }
    for (index_t i = 0; i < count; ++i) positions_.push_back(first_position + i);
  }
  NewRows(const NewRows&) = delete;
  NewRows& operator=(const NewRows&) = delete;

  std::span<const Rows<const T>> keys() const { return keys_; }
  std::span<const Rows<const T>> values() const { return values_; }
  std::span<const index_t> positions() const { return positions_; }

 private:
  std::vector<std::vector<T>> key_data_, value_data_;
  std::vector<Rows<const T>> keys_, values_;
  std::vector<index_t> positions_;
};

}  // namespace kvevict::testing
