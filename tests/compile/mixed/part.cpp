// One object of a program that is built for several instruction sets: plans and evicts, and says how it was compiled.
#include <cstdint>
#include <vector>

#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/policy/snapkv.hpp"

using namespace kvevict;

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

const char* JOIN(PART, _target)() { return simd_target(); }

// A digest of the rows that stay.
std::uint64_t JOIN(PART, _digest)() {
  constexpr index_t heads = 2, group = 2, tokens = 300, dim = 16, window = 32;
  std::vector<float> rows(static_cast<std::size_t>(heads * group * tokens * dim));
  std::uint32_t state = 1;
  for (float& x : rows) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f;
  }
  std::vector<index_t> positions;
  for (index_t i = 0; i < tokens; ++i) positions.push_back(i);
  RaggedCache<float> cache(CacheShape{1, heads, heads * group, dim, dim});
  std::vector<Rows<const float>> heads_of_rows;
  for (index_t h = 0; h < heads; ++h)
    heads_of_rows.push_back(dense_rows<const float>(rows.data() + h * tokens * dim, tokens, dim));
  cache.append(host_exec{2}, 0, heads_of_rows, heads_of_rows, positions);
  const auto observations = observe_all(cache, 0.25f, [&](OwnedObservation<float>& layer) {
    for (index_t q = 0; q < heads * group; ++q)
      layer.window_queries.push_back(dense_rows<const float>(rows.data() + q * tokens * dim, window, dim));
    layer.window_positions = std::span(positions).last(window);
  });
  const EvictionPlan plan = SnapKV{}.plan(host_exec{2}, cache, observations, Budget::retain(0.3));
  apply(host_exec{2}, plan, cache);
  std::uint64_t digest = 14695981039346656037u;
  for (const index_t row : plan.indices) digest = (digest ^ static_cast<std::uint64_t>(row)) * 1099511628211u;
  return digest;
}
