// The weights of an independent implementation of LKV, read and used: head scores, ratios and budgets must agree.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include "kvevict/io/safetensors.hpp"
#include "kvevict/lkv/checkpoint.hpp"
#include "kvevict/lkv/head_net.hpp"
#include "kvevict/lkv/lkv_h.hpp"

using namespace kvevict;

namespace {
const std::string folder = std::string(KVEVICT_TEST_DATA) + "/lkv/";
constexpr CacheShape smollm2{30, 3, 9, 64, 64};
}  // namespace

TEST_CASE("head scores and ratios of the stored weights agree to 1e-5") {
  const LkvCheckpoint checkpoint(folder + "weights.safetensors");
  const Safetensors expected(folder + "expected.safetensors");
  CHECK(checkpoint.sizes() == LkvSizes{30, 3, 64, 64, {}, 64, 32, 64});
  std::vector<double> scores(90), ratios(90);
  head_scores(checkpoint.head_net(), scores);
  const auto wanted = expected.at("head_score").as<float>();
  for (std::size_t i = 0; i < 90; ++i) CHECK(std::abs(scores[i] - static_cast<double>(wanted[i])) < 1e-5);
  for (const auto& [retain, tensor] : {std::pair{0.05, "ratio.retain_0.05"}, std::pair{0.15, "ratio.retain_0.15"},
                                       std::pair{0.5, "ratio.retain_0.50"}}) {
    head_ratios(scores, retain, ratios);
    const auto ratio = expected.at(tensor).as<float>();
    for (std::size_t i = 0; i < 90; ++i) CHECK(std::abs(ratios[i] - static_cast<double>(ratio[i])) < 1e-5);
  }
}

TEST_CASE("budgets of a prompt of 512 tokens at retain 0.15 equal the stored masks") {
  const std::vector<index_t> wanted{
      42,  60,  27,  32,  49,  42,  51,  106, 59, 27, 90,  51, 113, 14, 20,  61,  23,  67, 38,  40,  74,  18,  87,
      248, 279, 22,  64,  73,  32,  34,  20,  22, 30, 18,  39, 26,  61, 45,  36,  25,  16, 43,  103, 232, 55,  30,
      100, 114, 37,  24,  40,  148, 273, 40,  37, 37, 436, 86, 88,  19, 105, 212, 289, 81, 149, 124, 60,  104, 87,
      253, 108, 181, 155, 131, 125, 30,  17,  16, 47, 70,  15, 59,  30, 24,  59,  17,  28, 29,  13,  26};
  const std::vector<index_t> tokens(90, 512);
  Audit audit;
  const GrantedBudget budget = Budget::retain(0.15).resolve(tokens, 512, allocate::LkvH::minimum_rows, audit);
  std::vector<index_t> rows(90);
  allocate::LkvH part{LkvFile(folder + "weights.safetensors")};
  part.allocate(smollm2, tokens, budget, {rows.data(), 30, 3, 3}, audit);
  CHECK(rows == wanted);
  CHECK(std::accumulate(rows.begin(), rows.end(), 0) == 6867);
  part.exact = true;
  part.allocate(smollm2, tokens, budget, {rows.data(), 30, 3, 3}, audit);
  CHECK(std::accumulate(rows.begin(), rows.end(), 0) == 6912);  // floor(0.15 * 90 * 512)
}
