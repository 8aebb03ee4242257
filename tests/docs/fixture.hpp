// The names that code blocks of the documents may use without declaring them: a recording of a real run, a cache made
// from it, and a plan. Each block gets its own (tests/docs/extract.py makes a class of every block).
#pragma once
#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

#include "kvevict/io/dump.hpp"
#include "kvevict/kvevict.hpp"

struct Recording {
  kvevict::Dump<kvevict::fp16_t> dump{KVEVICT_SOURCE_DIR "/examples/data/smollm2-512.safetensors"};
  kvevict::Observations<kvevict::fp16_t> observations{kvevict::observe_all(dump)};
  kvevict::EvictionPlan plan{
      kvevict::KNorm{}.plan(kvevict::host_exec{}, dump.cache(), observations, kvevict::Budget::retain(0.5))};
};

struct Fixture {
  const Recording& recording = [] {
    static const Recording once;
    return std::cref(once);
  }();
  kvevict::host_exec exec{2, nullptr};
  const kvevict::Dump<kvevict::fp16_t>& dump = recording.dump;
  const kvevict::RecordedCache<kvevict::fp16_t>& view = dump.cache();
  kvevict::CacheShape shape{view.shape()};
  const kvevict::Observations<kvevict::fp16_t>& observations = recording.observations;
  kvevict::RaggedCache<kvevict::fp16_t> cache{view};
  const kvevict::EvictionPlan& plan = recording.plan;
  kvevict::LayerPlan layer_plan{plan.layer(0)};
  std::vector<kvevict::index_t> prompt, next_tokens;
};

int failed = 0;

template <class Block>
void run(const char* where) {
  try {
    Block{}.body();
  } catch (const std::exception& error) {
    std::printf("%s: %s\n", where, error.what());
    failed = 1;
  }
}
