// The registry with everything this library holds. Includes every part, so it belongs into one translation unit.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "kvevict/allocate/ada.hpp"
#include "kvevict/allocate/full.hpp"
#include "kvevict/allocate/global.hpp"
#include "kvevict/allocate/pyramid.hpp"
#include "kvevict/allocate/uniform.hpp"
#include "kvevict/cpu/expected_attention.hpp"
#include "kvevict/cpu/score_heads.hpp"
#include "kvevict/cpu/token_network.hpp"
#include "kvevict/cpu/window_attention.hpp"
#include "kvevict/lkv/lkv_h.hpp"
#include "kvevict/lkv/lkv_t.hpp"
#include "kvevict/naming/registry.hpp"
#include "kvevict/score/chunks.hpp"
#include "kvevict/score/expected.hpp"
#include "kvevict/score/keydiff.hpp"
#include "kvevict/score/knorm.hpp"
#include "kvevict/score/oracle.hpp"
#include "kvevict/score/position.hpp"
#include "kvevict/score/random.hpp"
#include "kvevict/score/snapkv.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Checkpoints that LKV parts take where none is named, as paths or `shipped:NAME`; empty: they must be named.
struct LkvDefaults {
  std::string checkpoint;                                // of `lkv`
  std::string paper;                                     // of `lkv-paper`: the paper's plain form
  std::vector<std::filesystem::path> data_folders = {};  // where shipped files lie, after $KVEVICT_DATA
};

// All allocators, scorers and published combinations.
inline Registry standard_registry(const LkvDefaults& lkv = {}) {
  Registry r;
  r.add_allocator<allocate::Full>();
  r.add_allocator<allocate::Uniform>();
  r.add_allocator<allocate::Pyramid>();
  r.add_allocator<allocate::Global>();
  r.add_nesting_allocator<allocate::Ada>();
  const LkvFile learned(lkv.checkpoint, lkv.data_folders);  // both parts share what they read
  r.add_allocator(allocate::LkvH{.file = learned});

  r.add_scorer<score::SnapKV>();
  r.add_scorer<score::Position>();
  r.add_scorer<score::KNorm>();
  r.add_scorer<score::KeyDiff>();
  r.add_scorer<score::Random>();
  r.add_scorer<score::Expected>();
  r.add_scorer<score::Oracle>();
  r.add_wrapping_scorer<score::Chunks>();
  r.add_scorer(score::LkvT{.file = learned});

  r.add_preset("full", "full/position(sinks=0)", "every row stays");
  r.add_preset("oracle", "global/oracle", "the best selection in hindsight: it looks at the continuation");
  r.add_preset("random", "uniform/random", "random rows, the same on every platform");
  r.add_preset("streamingllm", "uniform/position(sinks=4)", "StreamingLLM, arXiv 2309.17453");
  r.add_preset("knorm", "uniform/knorm", "L2 norm of the key, arXiv 2406.11430");
  r.add_preset("keydiff", "uniform/keydiff", "KeyDiff, arXiv 2504.15364");
  r.add_preset("expected", "uniform/expected", "Expected Attention, arXiv 2510.00636");
  r.add_preset("snapkv", "uniform/snapkv", "SnapKV, arXiv 2404.14469");
  r.add_preset("snapkv-kvpress",
               "uniform(rounding=kvpress)/snapkv(window=64,pool=avg:5,order=pool-then-group,protect=score)",
               "SnapKV as NVIDIA kvpress 0.5.5 computes it");
  r.add_preset("pyramidkv", "pyramid(beta=20)/snapkv", "PyramidKV, arXiv 2406.02069");
  r.add_preset("adakv", "ada(floor=0.2)/snapkv", "Ada-KV, arXiv 2407.11550");
  if (!lkv.checkpoint.empty())
    r.add_preset("lkv", "lkv-h/lkv-t", "LKV, arXiv 2605.06676: budgets and scores learned end to end");
  if (!lkv.paper.empty()) {
    const std::string file = "(file=" + print_value(lkv.paper) + ')';
    r.add_preset("lkv-paper", "lkv-h" + file + "/lkv-t" + file, "LKV in the paper's plain form: keys after RoPE");
  }
  return r;
}

}  // namespace kvevict::inline KVEVICT_ABI
