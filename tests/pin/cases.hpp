// What is planned: texts of policies and scorers, and budgets.
#pragma once
#include <string>
#include <vector>

#include "pin/api.hpp"

namespace pin {

// "LKV" and "PAPER" stand for the checkpoints of examples/data.
inline std::vector<std::string> presets() {
  return {"full",     "oracle", "random",         "streamingllm", "knorm", "keydiff",
          "expected", "snapkv", "snapkv-kvpress", "pyramidkv",    "adakv"};
}
inline std::vector<std::string> learned_presets() { return {"lkv", "lkv-paper"}; }

inline std::vector<std::string> scorers() {
  return {"position",
          "position(sinks=0)",
          "position(sinks=4,protect=full)",
          "position(sinks=3,protect=score)",
          "random",
          "random(seed=3,sinks=2,protect=full)",
          "knorm",
          "knorm(sinks=3)",
          "knorm(sinks=2,protect=score)",
          "keydiff",
          "keydiff(sinks=4,protect=full)",
          "keydiff(sinks=2,protect=score)",
          "expected",
          "expected(sinks=4)",
          "expected(future=7,covariance=false)",
          "expected(value_norm=false,epsilon=0.02)",
          "expected(sinks=3,protect=score)",
          "oracle",
          "oracle(sinks=2,protect=score)",
          "snapkv",
          "snapkv(window=8)",
          "snapkv(window=1,pool=none)",
          "snapkv(window=200)",
          "snapkv(window=8,rows=sum,group=max)",
          "snapkv(window=8,group=sum,pool=avg:5)",
          "snapkv(window=8,pool=max:3,order=pool-then-group)",
          "snapkv(window=8,pool=avg:5,order=pool-then-group,group=max)",
          "snapkv(window=8,pool=avg:9,group=none)",
          "snapkv(window=8,sinks=2,protect=full)",
          "snapkv(window=8,sinks=2,protect=score)",
          "snapkv(window=16,scratch_limit=4096)",
          "snapkv(window=64,pool=avg:5,order=pool-then-group,protect=score)"};
}
inline std::vector<std::string> faulty_scorers() {
  return {"snapkv(window=0)", "snapkv(pool=max:4)",      "knorm(sinks=-1)", "position(sinks=-1)",
          "snapkv(sinks=-1)", "snapkv(windows=3)",       "snapvk",          "expected(future=0)",
          "knorm<keydiff>",   "snapkv(scratch_limit=-1)"};
}
// Fit the shape of the recording alone.
inline std::vector<std::string> learned_scorers() { return {"lkv-t(file=LKV)", "lkv-t(file=PAPER)"}; }

inline std::vector<std::string> allocators() {
  return {"full",
          "uniform",
          "uniform(exact=true)",
          "uniform(rounding=kvpress)",
          "uniform(exact=true,rounding=kvpress)",
          "pyramid",
          "pyramid(beta=4)",
          "pyramid(rounding=reference,window=4)",
          "pyramid(rounding=kvpress,window=4)",
          "ada",
          "ada(floor=0.5)",
          "ada(floor=0)",
          "ada(floor=1)",
          "ada(variant=kvpress)",
          "ada(variant=reference)",
          "ada(variant=reference,concentration=true)",
          "ada(normalize=softmax)",
          "ada(normalize=none)",
          "ada<pyramid>",
          "ada<pyramid(beta=4)>(floor=0.4)",
          "ada<uniform(exact=true)>",
          "ada<uniform(rounding=kvpress)>",
          "global",
          "global(minimum=1)",
          "global(normalize=softmax)",
          "global(normalize=none)"};
}
inline std::vector<std::string> faulty_allocators() {
  return {
      "ada(floor=2)",    "ada(concentration=true)", "ada<ada>",           "ada<global>",          "uniform<pyramid>",
      "pyramid(beta=0)", "pyramid(window=-1)",      "global(minimum=-1)", "uniform(exact=maybe)", "unifrom",
      "lkv-h(file=NONE)"};
}
inline std::vector<std::string> learned_allocators() {
  return {"lkv-h(file=LKV)", "lkv-h(file=LKV,exact=true)", "lkv-h(file=PAPER)", "ada<lkv-h(file=LKV)>"};
}

// Scorers that every allocator is tried with: protected sinks, nothing protected, a window, comparable and not.
inline std::vector<std::string> scorers_of_allocators() {
  return {"position(sinks=4)",
          "knorm",
          "keydiff(sinks=2,protect=full)",
          "snapkv(window=8)",
          "snapkv(window=8,sinks=2,protect=score)",
          "random(seed=5)"};
}

// Texts that are no policy.
inline std::vector<std::string> faulty_texts() {
  return {"",
          "uniform",
          "snapkv(",
          "uniform/",
          "uniform/snapkv(window=)",
          "uniform/snapkv/snapkv",
          "snapkvv",
          "ada<>/snapkv",
          "/snapkv",
          "uniform /snapkv",
          "position/uniform",
          "snapkv(window=8",
          "adakv(floor=0.5,window=8)",
          "pyramidkv(beta=7,sinks=1)",
          "streamingllm(sinks=2)",
          "knorm(window=3)"};
}

struct NamedBudget {
  std::string name;
  Budget budget;
};
inline std::vector<NamedBudget> budgets(std::int64_t row_bytes, std::int64_t rows) {
  return {{"retain=0.05", Budget::retain(0.05)},
          {"retain=0.3", Budget::retain(0.3)},
          {"retain=0.7", Budget::retain(0.7)},
          {"retain=1", Budget::retain(1.0)},
          {"rows=6", Budget::rows(6)},
          {"rows=0", Budget::rows(0)},
          {"bytes=half", Budget::bytes(rows * row_bytes / 2 + 1)}};
}

}  // namespace pin
