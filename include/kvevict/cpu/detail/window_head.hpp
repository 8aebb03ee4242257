// Column sums of the window attention of one KV head: the arithmetic under score/snapkv.hpp.
//
//   sum_j = sum over rows r of weight_r * 2^(x_rj - reference_r),   x = q . k * softmax_scale * log2(e)
//
// With the log-sum-exp of the rows, references and weights are known and one pass gives the sums. Without it a first
// pass adds up each row's mass against a reference that need not be the row's maximum, only near it (float32 has room
// for 2^100 on either side; a row that climbs higher is noticed by its mass and done again). It keeps the exponentials,
// so that the second step is one weighted sum, or it keeps nothing and the products are computed again: same
// arithmetic, same sums to the bit.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kvevict/core/exec.hpp"
#include "kvevict/core/half.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/detail/window_kernel.hpp"
#include "kvevict/cpu/vector.hpp"

namespace kvevict::inline KVEVICT_ABI::detail {

// Extent of one head's work.
struct WindowSize {
  index_t dim = 0, rows = 0, group = 0;  // rows: window rows used per query head
  index_t tokens = 0, past = 0;          // past: tokens that get a sum, the first ones
  bool one_sum = true;                   // all query heads add to one row of sums; else a row for each
  bool lse = false;                      // the rows' log-sum-exp is given
  bool store = false;                    // without it: keep the exponentials [past][slots]

  // Slots per row of sums, and of all.
  std::size_t unit() const noexcept {
    const std::size_t own = static_cast<std::size_t>(rows) * (one_sum ? static_cast<std::size_t>(group) : 1);
    return (own + simd::width - 1) / simd::width * simd::width;
  }
  std::size_t units() const noexcept { return one_sum ? 1 : static_cast<std::size_t>(group); }
  std::size_t slots() const noexcept { return unit() * units(); }
};

template <class T>
struct WindowInput {
  WindowSize size;
  Rows<const T> keys;                        // [tokens][dim]
  std::span<const Rows<const T>> queries;    // [group] of [recorded][dim]; the newest size.rows are used
  std::span<const index_t> key_positions;    // [tokens], ascending; empty: key j has position j
  std::span<const index_t> query_positions;  // [recorded], ascending
  std::span<const float> lse;                // [group * recorded] where size.lse
  float softmax_scale = 1.f;
  float weight = 1.f;  // factor of every probability
};

// One head's work on one thread's memory.
template <class T>
class WindowHead {
 public:
  // Bytes of working memory.
  static std::size_t scratch_bytes(const WindowSize& s) noexcept { return Parts(s, nullptr).end; }

  // scratch: scratch_bytes(in.size), aligned as an Arena is.
  WindowHead(const WindowInput<T>& in, std::span<std::byte> scratch)
      : in_(in),
        s_(in.size),
        p_(in.size, scratch.data()),
        slots_(s_.slots()),
        dim_(static_cast<std::size_t>(s_.dim)),
        past_(static_cast<std::size_t>(s_.past)),
        tokens_(static_cast<std::size_t>(s_.tokens)),
        first_row_(static_cast<index_t>(in.query_positions.size()) - s_.rows) {
    pack_queries();
  }

  // sums: [units][past].
  void run(Matrix<float> sums) {
    if (!s_.lse) {
      find_references(std::min(tokens_, 2 * block_keys));
      if (!measure_mass()) {
        find_references(tokens_);
        measure_mass();
      }
    }
    const std::size_t unit = s_.unit();
    if (s_.store) {
      for (std::size_t first = 0; first < past_; first += tile_keys)  // all units while a tile's rows are in the cache
        for (std::size_t u = 0; u < s_.units(); ++u)
          weighted_sums(p_.kept + first * slots_ + u * unit, slots_, std::min(tile_keys, past_ - first),
                        unit / simd::width, p_.weight + u * unit, sums.row(static_cast<index_t>(u)) + first);
      return;
    }
    for_tiles(0, past_, [&](std::size_t first, std::size_t keys) {
      for (std::size_t u = 0; u < s_.units(); ++u) {
        std::fill_n(p_.sums, keys * simd::width, 0.f);
        for_blocks(u * unit, (u + 1) * unit, keys, [&](const Block& b) {
          add_weighted(b.x, b.stride, b.keys, b.vectors, p_.reference + b.slot, p_.weight + b.slot,
                       p_.sums + b.first * simd::width);
        });
        float* const out = sums.row(static_cast<index_t>(u)) + first;
        for (std::size_t j = 0; j < keys; ++j) out[j] = simd::sum(simd::load(p_.sums + j * simd::width));
      }
    });
  }

 private:
  // Where everything lies in the working memory; each part begins on a cache line.
  struct Parts {
    std::byte* base;
    std::size_t end = 0;  // bytes
    float *queries, *reference, *weight, *limit, *mass, *tile, *products, *sums, *kept;
    double* total;

    Parts(const WindowSize& s, std::byte* memory) : base(memory) {
      const std::size_t slots = s.slots();
      queries = take<float>(slots * static_cast<std::size_t>(s.dim));
      reference = take<float>(slots);
      weight = take<float>(slots);
      limit = take<float>(slots);
      mass = take<float>(slots);
      total = take<double>(slots);
      tile = take<float>(tile_keys * stage_stride(s.dim));
      products = take<float>(block_keys * panel_vectors * simd::width);
      sums = take<float>(tile_keys * simd::width);
      kept = take<float>(s.store ? static_cast<std::size_t>(s.past) * slots : 0);
    }
    template <class N>
    N* take(std::size_t count) {
      N* const at = base == nullptr ? nullptr : reinterpret_cast<N*>(base + end);
      end += (count * sizeof(N) + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
      return at;
    }
  };

  // Products of `keys` keys of a tile, from the tile's `first` on, with `vectors` vectors of slots from `slot` on.
  struct Block {
    float* x;  // [block_keys][stride]
    std::size_t stride, first, keys, slot, vectors;
  };

  // Keys that a recorded query row sees, [0, result).
  index_t visible_keys(index_t row) const {
    const index_t at = in_.query_positions[static_cast<std::size_t>(row)];
    if (in_.key_positions.empty()) return std::min(s_.tokens, at + 1);
    return static_cast<index_t>(std::upper_bound(in_.key_positions.begin(), in_.key_positions.end(), at) -
                                in_.key_positions.begin());
  }
  std::size_t slot_of(index_t query_head, index_t row) const {
    const auto g = static_cast<std::size_t>(query_head), r = static_cast<std::size_t>(row - first_row_);
    return g * (s_.one_sum ? static_cast<std::size_t>(s_.rows) : s_.unit()) + r;
  }
  // f(query head of the group, recorded row, its slot)
  template <class F>
  void for_slots(F f) const {
    for (index_t g = 0; g < s_.group; ++g)
      for (index_t r = first_row_; r < first_row_ + s_.rows; ++r) f(g, r, slot_of(g, r));
  }
  // f(first slot, vectors) for the panels of slots [begin, end), which are whole units.
  template <class F>
  void for_panels(std::size_t begin, std::size_t end, F f) const {
    constexpr std::size_t width = panel_vectors * simd::width;
    const std::size_t unit = s_.unit();
    for (; begin < end; begin += unit)
      for (std::size_t at = 0; at < unit; at += width) f(begin + at, std::min(width, unit - at) / simd::width);
  }

  // Scaled queries as panels [dim][panel width], and what is known of each slot before any key is looked at: padding
  // and rows that see nothing weigh nothing.
  void pack_queries() {
    constexpr double log2_e = 1.4426950408889634;
    const auto scale = static_cast<float>(static_cast<double>(in_.softmax_scale) * log2_e);
    std::fill_n(p_.queries, slots_ * dim_, 0.f);
    std::fill_n(p_.reference, slots_, 0.f);
    std::fill_n(p_.weight, slots_, 0.f);
    seen_by_all_ = tokens_;
    for_slots([&](index_t g, index_t row, std::size_t slot) {
      constexpr std::size_t width = panel_vectors * simd::width;
      const std::size_t unit_begin = slot / s_.unit() * s_.unit(), in_unit = slot - unit_begin,
                        panel = in_unit / width * width, panel_width = std::min(width, s_.unit() - panel);
      float* const to = p_.queries + (unit_begin + panel) * dim_ + (in_unit - panel);
      const Rows<const T>& q = in_.queries[static_cast<std::size_t>(g)];
      for (index_t c = 0; c < s_.dim; ++c)
        to[static_cast<std::size_t>(c) * panel_width] = to_float(q.at(row, c)) * scale;
      const index_t visible = visible_keys(row);
      seen_by_all_ = std::min(seen_by_all_, static_cast<std::size_t>(visible));
      if (visible == 0) return;
      p_.weight[slot] = in_.weight;
      if (!s_.lse) return;
      const std::size_t at = static_cast<std::size_t>(g) * in_.query_positions.size() + static_cast<std::size_t>(row);
      const double lse = static_cast<double>(in_.lse[at]) * log2_e;
      const double whole = std::isinf(lse) ? 0. : std::nearbyint(lse);  // exact as a float; the rest is in the weight
      p_.reference[slot] = static_cast<float>(whole);
      p_.weight[slot] = std::isinf(lse) ? 0.f : in_.weight * static_cast<float>(std::exp2(whole - lse));
    });
  }

  // body(first key, keys) for the tiles of keys [begin, end), each staged before.
  template <class Body>
  void for_tiles(std::size_t begin, std::size_t end, Body body) {
    for (std::size_t first = begin; first < end; first += tile_keys) {
      const std::size_t keys = std::min(tile_keys, end - first);
      stage_tile(in_.keys, static_cast<std::int64_t>(first), keys, p_.tile);
      masked_ = first + keys > seen_by_all_;
      if (masked_) {
        std::fill_n(p_.limit, slots_, 0.f);
        for_slots([&](index_t, index_t row, std::size_t slot) {
          const auto visible = static_cast<std::size_t>(visible_keys(row));
          p_.limit[slot] = static_cast<float>(std::min(keys, visible - std::min(visible, first)));
        });
      }
      body(first, keys);
    }
  }
  // body(block) for the blocks of the staged tile and the panels of slots [begin, end).
  template <class Body>
  void for_blocks(std::size_t begin, std::size_t end, std::size_t keys, Body body) {
    const std::size_t stride = stage_stride(s_.dim);
    for_panels(begin, end, [&](std::size_t slot, std::size_t vectors) {
      for (std::size_t j = 0; j < keys; j += block_keys) {
        const Block b{p_.products, vectors * simd::width, j, std::min(block_keys, keys - j), slot, vectors};
        block_products(vectors, p_.tile + j * stride, stride, p_.queries + slot * dim_, dim_, b.x);
        if (masked_) hide(b.x, b.stride, b.keys, vectors, p_.limit + slot, j);
        body(b);
      }
    });
  }

  // References: the largest product of each slot with the first keys.
  void find_references(std::size_t keys) {
    std::fill_n(p_.reference, slots_, std::numeric_limits<float>::lowest());
    for_tiles(0, keys, [&](std::size_t, std::size_t n) {
      for_blocks(0, slots_, n,
                 [&](const Block& b) { take_largest(b.x, b.stride, b.keys, b.vectors, p_.reference + b.slot); });
    });
    for (std::size_t slot = 0; slot < slots_; ++slot)
      if (p_.weight[slot] == 0.f) p_.reference[slot] = 0.f;
  }

  // Turns weights into weight / mass. False, with weights untouched, where a reference was too low for its row.
  bool measure_mass() {
    std::fill_n(p_.total, slots_, 0.);
    const auto measure = [&](std::size_t begin, std::size_t end, bool keep) {
      for_tiles(begin, end, [&](std::size_t first, std::size_t keys) {
        std::fill_n(p_.mass, slots_, 0.f);  // of this tile: float32 would lose what a long prompt adds up
        for_blocks(0, slots_, keys, [&](const Block& b) {
          float* const kept = keep ? p_.kept + (first + b.first) * slots_ + b.slot : nullptr;
          (keep ? add_mass<true> : add_mass<false>)(b.x, b.stride, b.keys, b.vectors, p_.reference + b.slot,
                                                    p_.mass + b.slot, kept, slots_);
        });
        for (std::size_t slot = 0; slot < slots_; ++slot) p_.total[slot] += static_cast<double>(p_.mass[slot]);
      });
    };
    measure(0, past_, s_.store);
    measure(past_, tokens_, false);
    simd::end_stream();
    for (std::size_t slot = 0; slot < slots_; ++slot)
      if (p_.weight[slot] != 0.f && p_.total[slot] >= 0x1p100) return false;
    for (std::size_t slot = 0; slot < slots_; ++slot)
      if (p_.weight[slot] != 0.f)
        p_.weight[slot] =
            p_.total[slot] == 0. ? 0.f : static_cast<float>(static_cast<double>(in_.weight) / p_.total[slot]);
    return true;
  }

  const WindowInput<T>& in_;
  const WindowSize s_;
  const Parts p_;
  const std::size_t slots_, dim_, past_, tokens_;
  const index_t first_row_;      // of the recorded query rows
  std::size_t seen_by_all_ = 0;  // keys that every row sees
  bool masked_ = false;          // the staged tile holds keys that some row does not see
};

}  // namespace kvevict::inline KVEVICT_ABI::detail
