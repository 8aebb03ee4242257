// What a benchmark file adds: named cases, each with a check that runs before anything is timed.
#pragma once
#include <benchmark/benchmark.h>

#include <functional>
#include <string>

namespace kvevict::bench {

// name: operation/implementation/size, for instance topk/kvevict/32768; points off the default carry a suffix on the
// operation (topk.bf16.k50/...). check throws where the implementation differs from the reference; it may be empty
// for bounds that compute nothing.
struct Case {
  std::string name;
  std::function<void()> check;
  std::function<void(benchmark::State&)> run;
};

// Call during static initialisation; main() checks and registers the cases that --benchmark_filter names.
void add_case(Case);

}  // namespace kvevict::bench
