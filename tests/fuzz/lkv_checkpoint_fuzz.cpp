// LKV checkpoints: weights that pass are finite and have the stated sizes.
#include "kvevict/lkv/checkpoint.hpp"

#include <cmath>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/random_cache.hpp"
#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

std::string seed(bool half, bool length) {
  const testing::TempDir folder;
  LkvSizes sizes{2, 1, 2, 3, {}, 2, 3, 4};
  sizes.head_length = length;
  const auto some = [](std::int64_t n) { return testing::random_elements<float>(static_cast<std::size_t>(n), 1); };
  const std::int64_t heads = sizes.heads();
  const auto embedding = some(heads * 2), w1 = some(2 * 3), b1 = some(3), w2 = some(3);
  const auto token_w1 = some(heads * sizes.token_inputs() * 4), token_b1 = some(heads * 4), token_w2 = some(heads * 4);
  const auto slopes = some(length ? heads : 0);
  write_lkv_checkpoint(folder / "lkv", sizes, {embedding, w1, b1, w2, token_w1, token_b1, token_w2, slopes},
                       {{"model", "small"}}, half);
  return testing::read_bytes(folder / "lkv");
}

void run(std::string_view input) {
  const InputFile file(input);
  const LkvCheckpoint checkpoint(file.path());
  const LkvTensors& t = checkpoint.tensors();
  const LkvSizes& s = checkpoint.sizes();
  const auto walk = [](std::span<const float> values, std::int64_t size) {
    if (std::ssize(values) != size) std::abort();
    for (const float x : values)
      if (!std::isfinite(x)) std::abort();
  };
  walk(t.embedding, s.heads() * s.head_width);
  walk(t.head_w1, std::int64_t{s.head_width} * s.head_hidden);
  walk(t.head_b1, s.head_hidden);
  walk(t.head_w2, s.head_hidden);
  walk(t.token_w1, s.heads() * s.token_inputs() * s.token_hidden);
  walk(t.token_b1, s.heads() * s.token_hidden);
  walk(t.token_w2, s.heads() * s.token_hidden);
  walk(t.head_length, s.head_length ? s.heads() : 0);
}

}  // namespace

const Target& target() {
  static const Target t{{seed(false, false), seed(true, false), seed(false, true)}, run, mutate_safetensors};
  return t;
}

}  // namespace kvevict::fuzz
