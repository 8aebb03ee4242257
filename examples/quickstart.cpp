// Loads a recorded dump, plans SnapKV at 15 % and evicts: the cache shrinks and says so.
#include <cstdio>

#include "kvevict/cache/ragged.hpp"
#include "kvevict/io/dump.hpp"
#include "kvevict/policy/snapkv.hpp"

int main(int argc, char** argv) {
  using namespace kvevict;
  const host_exec exec{2, nullptr};
  const Dump<fp16_t> dump(argc > 1 ? argv[1] : "examples/data/smollm2-512.safetensors");

  const auto observations = observe_all(dump);  // keys, values, window queries of each layer: views, not copies
  const EvictionPlan plan = SnapKV{}.plan(exec, dump.cache(), observations, Budget::retain(0.15));
  RaggedCache<fp16_t> cache(dump.cache());
  const auto before = cache.bytes_live();
  apply(exec, plan, cache);

  std::printf("%s\n%lld of %lld rows kept, %zu of %zu bytes live\n", plan.specification.c_str(),
              static_cast<long long>(plan.rows_kept()), static_cast<long long>(plan.granted.full), cache.bytes_live(),
              before);
  for (const auto& entry : plan.audit.entries()) std::printf("audit: %s\n", entry.c_str());
}
