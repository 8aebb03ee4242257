// One digest of selections over fixed arrays. The same source is compiled for each instruction set and once without
// vector code; all executables must print the same lines. With --target it prints the instruction set that it uses.
// KVEVICT_EXPECTED_TARGET, where defined, must be that instruction set: a wrong flag fails here, at compile time.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "kvevict/core/half.hpp"
#include "kvevict/core/protect.hpp"
#include "kvevict/core/rows.hpp"
#include "kvevict/core/shape.hpp"
#include "kvevict/cpu/select_row.hpp"
#include "kvevict/cpu/simd.hpp"
#include "kvevict/cpu/topk.hpp"

#if defined(KVEVICT_EXPECTED_TARGET)
static_assert(std::string_view(kvevict::simd_target()) == KVEVICT_EXPECTED_TARGET,
              "the compiler's flags did not select the instruction set that this executable is for");
#endif

namespace {

using namespace kvevict;

// FNV-1a over 32-bit words.
class Digest {
 public:
  void add(std::span<const index_t> values) {
    for (const index_t value : values) hash_ = (hash_ ^ static_cast<std::uint32_t>(value)) * 0x100000001b3u;
    hash_ = (hash_ ^ values.size()) * 0x100000001b3u;
  }
  unsigned long long value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

// Scores made from integers alone, so that every compiler makes the same ones.
constexpr int kinds = 7;
float score(int kind, std::uint32_t random, std::size_t i) {
  switch (kind) {
    case 0:  // any number, any sign
      return std::bit_cast<float>((random & 0x807fffffu) | (1 + (random >> 8) % 254) << 23);
    case 1:  // positive, over eight octaves
      return std::bit_cast<float>(0x3d000000u + (random & 0x03ffffffu));
    case 2:  // negative
      return -std::bit_cast<float>(0x3f800000u + (random & 0x007fffffu));
    case 3:  // few values around zero, zeros of both signs among them
      return static_cast<float>(static_cast<int>(random % 5) - 2) * (random % 2 == 0 ? 1.f : -1.f);
    case 4:  // denormals
      return std::bit_cast<float>(random & 0x007fffffu);
    case 5:  // ascending
      return static_cast<float>(i);
    default:  // infinities among numbers
      return std::bit_cast<float>(random % 3 == 0   ? 0x7f800000u
                                  : random % 3 == 1 ? 0xff800000u
                                                    : 0x3f800000u + random % 9);
  }
}

template <class T>
void digest_rows(const char* type) {
  for (const std::size_t n : {1u, 15u, 16u, 17u, 100u, 129u, 1000u, 4096u, 33333u, 70001u}) {
    Digest digest;
    std::vector<std::byte> scratch(topk_scratch_bytes(static_cast<std::int64_t>(n)));
    for (int kind = 0; kind < kinds; ++kind) {
      std::mt19937 random(static_cast<std::uint32_t>(n) * 16u + static_cast<std::uint32_t>(kind));
      std::vector<T> scores(n);
      for (std::size_t i = 0; i < n; ++i)
        scores[i] = from_float<T>(score(kind, static_cast<std::uint32_t>(random()), i));
      for (const std::size_t k : {std::size_t{0}, std::size_t{1}, n / 100, n * 15 / 100, n / 2, n - 1, n}) {
        if (k > n) continue;
        std::vector<index_t> out(k);
        topk(std::span<const T>(scores), static_cast<index_t>(k), out, scratch);
        digest.add(out);
      }
    }
    std::printf("topk %s n=%zu %016llx\n", type, n, digest.value());
  }
}

void digest_matrix() {
  constexpr index_t rows = 8, cols = 5000;
  for (int kind = 0; kind < kinds; ++kind) {
    std::mt19937 random(static_cast<std::uint32_t>(kind) + 99u);
    std::vector<float> scores(std::size_t{rows} * std::size_t{cols});
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = score(kind, static_cast<std::uint32_t>(random()), i);
    Digest digest;
    std::vector<IndexRange> candidates;
    std::int64_t count = 0;
    for (index_t r = 0; r < rows; ++r) {
      candidates.push_back(r == 3 ? IndexRange{} : IndexRange{4 * r, cols - 32});
      count += candidates.back().size();
    }
    std::vector<std::byte> scratch(flat_topk_scratch_bytes(rows, cols));
    std::vector<index_t> counts(rows);
    for (const std::int64_t k : {std::int64_t{1}, count / 10, count / 2, count}) {
      flat_topk_counts({scores.data(), rows, cols, cols}, candidates, k, counts, scratch);
      digest.add(counts);
    }
    std::vector<index_t> out(cols);
    for (const index_t budget : {0, 40, 750, 2500, 4999, 5000}) {
      const Protect protect{.sinks = 4, .window = 32};
      const index_t kept =
          select_row(TopK{}, {scores.data(), std::size_t{cols}}, budget, protect_asked(protect, cols), out, scratch);
      digest.add(std::span(out).first(static_cast<std::size_t>(kept)));
    }
    std::printf("matrix kind=%d %016llx\n", kind, digest.value());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--target") == 0) {
    std::puts(simd_target());
    return 0;
  }
  digest_rows<float>("f32");
  digest_rows<fp16_t>("f16");
  digest_rows<bf16_t>("bf16");
  digest_matrix();
}
