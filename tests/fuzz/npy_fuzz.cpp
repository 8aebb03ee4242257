// NumPy's files, read as arrays of float and double, and as the keys and values of a cache.
#include "kvevict/io/npy.hpp"

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/common/input_file.hpp"
#include "fuzz/common/target.hpp"

namespace kvevict::fuzz {
namespace {

constexpr std::string_view magic = "\x93NUMPY\x01";

std::string npy(std::string header, std::size_t bytes) {
  std::string out = std::string(magic) + std::string(1, '\0');
  header += '\n';
  out += static_cast<char>(header.size() & 255);
  out += static_cast<char>(header.size() >> 8);
  out += header;
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>(i * 7 % 64);
  return out;
}

std::vector<std::string> seeds() {
  return {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 3), }", 24),
          npy("{'descr': '<f8', 'fortran_order': True, 'shape': (2, 2, 1)}", 32),
          npy("{\"shape\": (3,), \"descr\": \"<f4\", \"fortran_order\": False}", 12),
          npy("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", 4)};
}

// Header and data apart; the length between them is set right again.
std::string mutate(std::string_view input, std::size_t most, Random& random) {
  const std::size_t length =
      input.size() < 10 ? 0 : static_cast<unsigned char>(input[8]) + 256u * static_cast<unsigned char>(input[9]);
  if (input.size() < 10 || !input.starts_with(magic) || length > input.size() - 10 || random.integer(0, 7) == 0)
    return mutate_text(std::string(input), most - input.size());
  std::string header(input.substr(10, length)), data(input.substr(10 + length));
  static const std::vector<std::string> pieces{
      "1",     "0",     ", ",   "2",     "()",        "(",          ")",
      "'<f8'", "'<f4'", "True", "False", "'shape': ", "4294967296", "9223372036854775807",
      "{",     "}",     "'"};
  switch (random.integer(0, 3)) {
    case 0:
      header = mutate_text(std::move(header), 16);
      break;
    case 1:
      header.insert(random.bits() % (header.size() + 1), pieces[random.bits() % pieces.size()]);
      break;
    case 2:
      if (!header.empty()) header.erase(random.bits() % header.size(), 1 + random.bits() % 4);
      break;
    default:
      data.resize(random.bits() % 64);
  }
  if (header.size() > 65535) return {};
  std::string out(input.substr(0, 8));
  out += static_cast<char>(header.size() & 255);
  out += static_cast<char>(header.size() >> 8);
  return out + header + data;
}

void run(std::string_view input) {
  const InputFile file(input);
  double sum = 0;
  for (const float x : read_npy<float>(file.path())) sum += static_cast<double>(x);
  for (const double x : read_npy<double>(file.path())) sum += x;
  use(sum);
  const auto cache = read_npy_cache({{file.path(), file.path(), file.path()}});
  for (index_t h = 0; h < cache.shape().kv_heads; ++h) {
    const auto rows = cache.keys(0, h);
    for (std::int64_t r = 0; r < rows.rows; ++r)
      for (index_t c = 0; c < rows.cols; ++c) use(static_cast<double>(rows.at(r, c)));
  }
}

}  // namespace

const Target& target() {
  static const Target t{seeds(), run, mutate};
  return t;
}

}  // namespace kvevict::fuzz
