// Everything that decides what LKV training does, as named values: for the command line, the config file, the state
// that a run resumes from and the metadata of the checkpoint it makes.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "kvevict/core/error.hpp"
#include "kvevict/core/parameters.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/soft_topk.hpp"
#include "kvevict/lkv/token_net.hpp"

namespace kvevict::inline KVEVICT_ABI {

// Where the ratios of heads come from: embeddings and a shared network, one free logit per head, or no learning.
enum class BudgetForm { network, direct, uniform };
constexpr auto words_of(BudgetForm) noexcept {
  return std::to_array<std::string_view>({"network", "direct", "uniform"});
}

// Which queries see the mask: those of the texts behind the context, as where inference evicts behind the prefill, or
// those of the context as well, so that errors pass from layer to layer.
enum class MaskedQueries { faithful, dense };
constexpr auto words_of(MaskedQueries) noexcept { return std::to_array<std::string_view>({"faithful", "dense"}); }

// Defaults are those of the shipped checkpoint; docs/reproducing-lkv.md says which are the paper's.
struct LkvRecipe {
  std::int64_t steps = 500;
  index_t batch = 4;                       // contexts of 512 tokens a step; of longer ones as many as are as much work
  double lr = 4e-3, lr_end = 4e-4;         // linear
  double warm_up = 0.02;                   // share of the steps
  double tau = 1, tau_end = 0.015;         // temperature, exponential
  double retain = 0.5, retain_end = 0.13;  // exponential
  double retain_spread = 1;                // each context draws its retention from [retention / spread, retention]
  double beta = 0.5;                       // weight of the hidden states
  double clip = 1;                         // largest norm of the gradient; 0: none
  double weight_decay = 0;
  bool noise = true;  // Gumbel(0, 1) on every score
  SoftThreshold threshold = SoftThreshold::laplace;
  MaskedQueries masked_queries = MaskedQueries::faithful;
  BudgetForm budgets = BudgetForm::network;
  bool budget_length = false;  // LKV-H also learns slopes over the context's length
  KeyFrame key_frame = KeyFrame::pre_rope;
  TokenFeatures features = TokenFeatures::distance;
  bool scale_inputs = true;                   // standardise [key ; value], folded into the first layer at the end
  index_t head_width = 64, head_hidden = 32;  // embedding and hidden layer of LKV-H
  index_t token_hidden = 64;                  // hidden layer of LKV-T
  index_t continuation = 17;                  // tokens of the continuation that are fed, at most
  index_t contexts = 240;                     // of each length, from the files in turn; 0: all
  index_t check_contexts = 4;                 // set apart for the hard loss
  index_t group = 2;                          // contexts that share their matrix products
  std::uint64_t seed = 1;

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("steps", self.steps);
    visit("batch", self.batch);
    visit("lr", self.lr);
    visit("lr_end", self.lr_end);
    visit("warm_up", self.warm_up);
    visit("tau", self.tau);
    visit("tau_end", self.tau_end);
    visit("retain", self.retain);
    visit("retain_end", self.retain_end);
    visit("retain_spread", self.retain_spread);
    visit("beta", self.beta);
    visit("clip", self.clip);
    visit("weight_decay", self.weight_decay);
    visit("noise", self.noise);
    visit("threshold", self.threshold);
    visit("masked_queries", self.masked_queries);
    visit("budgets", self.budgets);
    visit("budget_length", self.budget_length);
    visit("key_frame", self.key_frame);
    visit("features", self.features);
    visit("scale_inputs", self.scale_inputs);
    visit("head_width", self.head_width);
    visit("head_hidden", self.head_hidden);
    visit("token_hidden", self.token_hidden);
    visit("continuation", self.continuation);
    visit("contexts", self.contexts);
    visit("check_contexts", self.check_contexts);
    visit("group", self.group);
    visit("seed", self.seed);
  }

  // key=value, comma separated.
  std::string text() const {
    std::string out;
    parameters(*this, [&](std::string_view key, const auto& value) {
      out += (out.empty() ? "" : ",") + std::string(key) + '=' + print_value(value);
    });
    return out;
  }

  // Sets one value. Throws std::invalid_argument naming the key where it is unknown or the text is no value of it.
  void set(std::string_view key, std::string_view value) {
    if (!set_parameter("LKV training", *this, key, value))
      fail_argument("LKV training: '", key, "' is unknown; known are ", text());
  }

  // Throws std::invalid_argument naming the value that cannot be meant.
  void check() const {
    const auto require = [](bool good, std::string_view key, auto value, std::string_view rule) {
      if (!good) fail_argument("LKV training: ", key, " is ", value, "; ", rule, " is required");
    };
    require(steps >= 1, "steps", steps, "at least 1");
    require(batch >= 1, "batch", batch, "at least 1");
    require(lr > 0 && lr_end > 0 && lr < 1 && lr_end <= lr, "lr", lr, "0 < lr_end <= lr < 1");
    require(warm_up >= 0 && warm_up <= 1, "warm_up", warm_up, "a share from 0 to 1");
    require(tau > 0 && tau_end > 0 && tau_end <= tau, "tau", tau, "0 < tau_end <= tau");
    require(retain > 0 && retain < 1, "retain", retain, "0 < retain < 1");
    require(retain_end > 0 && retain_end <= retain, "retain_end", retain_end, "0 < retain_end <= retain");
    require(retain_spread >= 1, "retain_spread", retain_spread, "at least 1");
    require(beta >= 0, "beta", beta, "at least 0");
    require(clip >= 0, "clip", clip, "at least 0");
    require(weight_decay >= 0, "weight_decay", weight_decay, "at least 0");
    constexpr index_t widest = 1 << 14;
    for (const auto& [key, width] :
         {std::pair{"head_width", head_width}, {"head_hidden", head_hidden}, {"token_hidden", token_hidden}})
      require(width >= 1 && width <= widest, key, width, "1 to 16384");
    require(!budget_length || budgets != BudgetForm::uniform, "budget_length", "true", "budgets=network or direct");
    require(continuation >= 1, "continuation", continuation, "at least 1");
    require(contexts >= 0, "contexts", contexts, "at least 0");
    require(check_contexts >= 0, "check_contexts", check_contexts, "at least 0");
    require(group >= 1, "group", group, "at least 1");
  }

  LkvSizes sizes(const CacheShape& shape) const {
    LkvSizes s;
    s.layers = shape.layers;
    s.kv_heads = shape.kv_heads;
    s.head_dim_k = shape.head_dim_k;
    s.head_dim_v = shape.head_dim_v;
    s.input = {key_frame, features};
    s.head_width = budgets == BudgetForm::network ? head_width : 0;
    s.head_hidden = budgets == BudgetForm::network ? head_hidden : 0;
    s.token_hidden = token_hidden;
    s.head_length = budget_length && budgets != BudgetForm::uniform;
    return s;
  }
};

}  // namespace kvevict::inline KVEVICT_ABI
