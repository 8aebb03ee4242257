// Which of the package's modules this processor runs. A module of its own, since it has to answer before any of them is
// loaded.
#include <nanobind/nanobind.h>

#if defined(__x86_64__)
namespace {
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
}  // namespace
#endif

NB_MODULE(_cpu, m) {
  m.def("paths", [] {
    nanobind::list out;
#if defined(__x86_64__)
    // Every processor with AVX2 has F16C, LZCNT and MOVBE, which compilers do not all know to ask for.
    if (has_avx512()) out.append("avx512");
    if (has_avx2()) out.append("avx2");
#endif
    out.append("baseline");
    return out;
  });
}
