// Scores: no NaN passes, and every layer has its matrix.
#include "kvevict/io/scores_file.hpp"

#include <cmath>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "common/temp_dir.hpp"
#include "fuzz/common/input_file.hpp"
#include "fuzz/common/mutate_safetensors.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

std::vector<std::string> seeds() {
  const testing::TempDir folder;
  const std::vector<float> scores{1, 2, 3, 4, 5, 6};
  ScoresWriter file("knorm", "a dump");
  file.add({scores.data(), 2, 3, 3});
  file.add({scores.data(), 2, 3, 3});
  file.write(folder / "scores");
  return {testing::read_bytes(folder / "scores")};
}

void run(std::string_view input) {
  const InputFile file(input);
  const ScoresFile scores(file.path());
  for (index_t l = 0; l < scores.layers(); ++l)
    for (index_t h = 0; h < scores.layer(l).rows; ++h)
      for (index_t t = 0; t < scores.layer(l).cols; ++t) {
        if (std::isnan(scores.layer(l).at(h, t))) std::abort();
        use(static_cast<double>(scores.layer(l).at(h, t)));
      }
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate_safetensors};
  return t;
}

}  // namespace kvevict::fuzz
