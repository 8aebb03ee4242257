// What an engine does first: include one header, evict from its own buffers.
#include <cstdio>
#include <vector>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/policy/streamingllm.hpp"

int main() {
  using namespace kvevict;
  const CacheShape shape{1, 1, 1, 2, 2};
  RaggedCache<float> cache(shape);
  std::vector<float> rows(2 * 16);
  std::vector<index_t> positions(16);
  for (int i = 0; i < 16; ++i) positions[static_cast<std::size_t>(i)] = i;
  const Rows<const float> view = dense_rows<const float>(rows.data(), 16, 2);
  cache.append(host_exec{}, 0, std::span(&view, 1), std::span(&view, 1), positions);
  const auto layer = observe_layer(cache, 0, 1.f);
  const LayerObservation<float> observation = layer.observation();
  const auto plan = StreamingLLM{}.plan(host_exec{}, cache, std::span(&observation, 1), Budget::rows(8));
  apply(host_exec{}, plan, cache);
  std::printf("%d rows, first %d, last %d\n", cache.tokens(0, 0), cache.positions(0, 0).front(),
              cache.positions(0, 0).back());
  return cache.tokens(0, 0) == 8 && cache.positions(0, 0).front() == 0 ? 0 : 1;
}
