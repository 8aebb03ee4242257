// Recordings: every row, query and extra tensor of a dump that passes can be read.
#include "kvevict/io/dump.hpp"

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/synthetic_dump.hpp"
#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

std::vector<std::string> seeds() {
  const testing::TempDir folder;
  testing::SyntheticDump small{.shape = {1, 1, 2, 4, 4}, .prompt_len = 5, .continuation_len = 2, .prompt_queries = 2};
  small.write<float>(folder / "f32");
  small.shape = {2, 2, 4, 2, 2};
  small.write<fp16_t>(folder / "f16");
  small.extras = false;
  small.continuation_len = 0;
  small.write<bf16_t>(folder / "bf16");
  return {testing::read_bytes(folder / "f32"), testing::read_bytes(folder / "f16"),
          testing::read_bytes(folder / "bf16")};
}

template <class T>
double sum_of(const Rows<const T>& rows) {
  double sum = 0;
  for (std::int64_t r = 0; r < rows.rows; ++r)
    for (index_t c = 0; c < rows.cols; ++c) sum += static_cast<double>(to_float(rows.at(r, c)));
  return sum;
}

void run(std::string_view input) {
  const InputFile file(input);
  visit_dump(file.path(), [](const auto& dump) {
    const auto& cache = dump.cache();
    const CacheShape shape = dump.info().shape;
    for (index_t l = 0; l < shape.layers; ++l) {
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        use(sum_of(cache.keys(l, h)) + sum_of(cache.values(l, h)));
        for (const index_t p : cache.positions(l, h)) use(p);
      }
      const auto layer = observe_layer(dump, l);
      for (const auto& rows : layer.window_queries) use(sum_of(rows));
      for (const auto& rows : layer.future_queries) use(sum_of(rows));
      for (const auto& rows : layer.attn_sum) use(sum_of(rows));
      for (const auto& rows : layer.q_mean) use(sum_of(rows));
      for (const auto& rows : layer.q_cov) use(sum_of(rows));
    }
  });
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate_safetensors};
  return t;
}

}  // namespace kvevict::fuzz
