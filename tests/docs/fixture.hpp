// The names that code blocks of the documents may use without declaring them: a recording of a real run, a cache made
// from it, and a plan. Each block gets its own (tests/docs/extract.py makes a class of every block).
#pragma once
#include <cstdio>
#include <exception>
#include <vector>

#include "kvevict/io/dump.hpp"
#include "kvevict/kvevict.hpp"

struct Fixture {
  kvevict::host_exec exec{2, nullptr};
  kvevict::Dump<kvevict::fp16_t> dump{KVEVICT_SOURCE_DIR "/examples/data/smollm2-512.safetensors"};
  kvevict::RecordedCache<kvevict::fp16_t> view{dump.cache()};
  kvevict::CacheShape shape{view.shape()};
  kvevict::Observations<kvevict::fp16_t> observations{kvevict::observe_all(dump)};
  kvevict::RaggedCache<kvevict::fp16_t> cache{view};
  kvevict::EvictionPlan plan;
  kvevict::LayerPlan layer_plan;  // of layer 0
  std::vector<kvevict::index_t> prompt, next_tokens;

  Fixture() {
    plan = kvevict::KNorm{}.plan(exec, view, observations, kvevict::Budget::retain(0.5));
    layer_plan = plan.layer(0);
  }
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
