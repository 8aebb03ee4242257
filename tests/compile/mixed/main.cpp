#include <cstdint>
#include <cstdio>
#include <cstring>

#define DECLARE(part)          \
  const char* part##_target(); \
  std::uint64_t part##_digest();
DECLARE(baseline)
DECLARE(fast)
DECLARE(portable)

int main() {
  std::printf("%s %s %s\n", baseline_target(), fast_target(), portable_target());
  if (std::strcmp(fast_target(), "AVX2") != 0 || std::strcmp(portable_target(), "portable") != 0 ||
      std::strcmp(baseline_target(), "AVX2") == 0)
    return 1;
  const std::uint64_t digest = baseline_digest();
  return fast_digest() == digest && portable_digest() == digest ? 0 : 2;
}
