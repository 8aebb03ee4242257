// Somebody else's buffers as a KVCacheView: no copy, a dozen lines. Here an engine that stores each layer as
// [token][head][2 * dim], keys and values of a head side by side, in bf16.
#include <cstdio>
#include <numeric>
#include <span>
#include <vector>

#include "kvevict/observe/observations.hpp"
#include "kvevict/policy/knorm.hpp"

// What the engine already has.
struct EngineLayer {
  std::vector<kvevict::bf16_t> buffer;  // [token][head][2 * dim]
};
struct Engine {
  int heads = 2, dim = 8, tokens = 64;
  std::vector<EngineLayer> layers = std::vector<EngineLayer>(4);
  std::vector<kvevict::index_t> positions = std::vector<kvevict::index_t>(64);
};

// What kvevict needs to see of it.
struct EngineView {
  using element_type = kvevict::bf16_t;
  using memory_space = kvevict::host_space;
  using index_t = kvevict::index_t;
  const Engine* engine;

  kvevict::CacheShape shape() const {
    return {static_cast<index_t>(engine->layers.size()), engine->heads, engine->heads, engine->dim, engine->dim};
  }
  index_t tokens(index_t, index_t) const { return engine->tokens; }
  kvevict::Rows<const element_type> keys(index_t layer, index_t head) const { return part(layer, head, 0); }
  kvevict::Rows<const element_type> values(index_t layer, index_t head) const { return part(layer, head, engine->dim); }
  std::span<const index_t> positions(index_t, index_t) const { return engine->positions; }

 private:
  kvevict::Rows<const element_type> part(index_t layer, index_t head, index_t offset) const {
    const auto& buffer = engine->layers[static_cast<std::size_t>(layer)].buffer;
    return {buffer.data() + head * 2 * engine->dim + offset, engine->tokens, engine->dim,
            engine->heads * 2 * engine->dim};
  }
};
static_assert(kvevict::KVCacheView<EngineView>);

int main() {
  using namespace kvevict;
  Engine engine;
  std::iota(engine.positions.begin(), engine.positions.end(), 0);
  for (auto& layer : engine.layers)
    for (int i = 0; i < engine.tokens * engine.heads * 2 * engine.dim; ++i)
      layer.buffer.push_back(from_float<bf16_t>(static_cast<float>((i * 37 + 11) % 101) / 101.f));

  const EngineView view{&engine};
  const auto observations = observe_all(view, 0.35f);
  const EvictionPlan plan = KNorm{}.plan(host_exec{}, view, observations, Budget::retain(0.25));
  std::printf("%s keeps %lld of %d rows; layer 0, head 0:", plan.specification.c_str(),
              static_cast<long long>(plan.rows_kept()), engine.tokens * engine.heads * 4);
  for (const index_t row : plan.head(0, 0)) std::printf(" %d", row);
  std::printf("\n");
}
