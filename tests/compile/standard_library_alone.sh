#!/usr/bin/env bash
# The headers that an engine includes must compile with nothing but the standard library on the path.
# Usage: standard_library_alone.sh COMPILER INCLUDE_DIR
set -euo pipefail
compiler=$1 include=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A path that holds this library and nothing else; anything from /usr/include that is not the standard library would
# be found by the compiler too, so the preprocessed output is searched for it.
ln -s "$include" "$work/include"
failed=0
for header in policy/snapkv policy/pyramidkv policy/adakv policy/streamingllm policy/policy cache/ragged cache/dense \
              cache/paged cache/apply score/knorm score/keydiff score/random allocate/global; do
  echo "#include \"kvevict/$header.hpp\"" >"$work/unit.cpp"
  "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -I"$work/include" "$work/unit.cpp" || failed=1
  foreign=$("$compiler" -std=c++20 -M -I"$work/include" "$work/unit.cpp" | tr ' \\' '\n\n' |
            grep -E '/(eigen3|Eigen|xtensor|xtl|nlohmann|CLI|doctest|benchmark)/' || true)
  if [ -n "$foreign" ]; then
    echo "kvevict/$header.hpp includes: $foreign" >&2
    failed=1
  fi
done
# Scorers and allocators are data: whatever is installed and switched on, their headers reach no kernel and no library.
for header in $(cd "$include/kvevict" && ls score/*.hpp allocate/*.hpp) lkv/lkv_t.hpp; do
  echo "#include \"kvevict/$header\"" >"$work/unit.cpp"
  # From the lines that name each file: clang's -M also lists what __has_include only asks for.
  foreign=$("$compiler" -std=c++20 -fopenmp -E -I"$work/include" -isystem /usr/include/eigen3 "$work/unit.cpp" |
            sed -n 's/^# [0-9]* "\(.*\)".*/\1/p' | sort -u | grep -E '/(hwy|eigen3|Eigen|nlohmann)/|/omp\.h$|kvevict/(cpu|cuda)/' || true)
  if [ -n "$foreign" ]; then
    echo "kvevict/$header reaches: $foreign" >&2
    failed=1
  fi
done
# Nowhere in the library: what belongs to the tool, the tests and the benchmarks.
if grep -rnE '#include *[<"](CLI|doctest|benchmark)/' "$include/kvevict"; then failed=1; fi
exit $failed
