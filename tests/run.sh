#!/usr/bin/env bash
# Installs what is missing, builds (g++, Release) and runs the tests; ends with ctest's closing line.
#   --deps    only install
#   --all     also clang with AddressSanitizer and UndefinedBehaviorSanitizer, fuzz targets, every header alone,
#             consumer projects, format, compiling CUDA where nvcc is, and more random plans and interruptions
#   --model   also what needs a real model (fetched once into build/models)
#   --peers   also the comparisons that need torch (run only where it is installed)
# KVEVICT_FUZZ_SECONDS, KVEVICT_FUZZ_SEED, KVEVICT_RANDOM_PLANS and KVEVICT_INTERRUPTIONS say how long, from where and
# how often (docs/building.md).
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/deps.sh

deps_only=0 all=OFF model=OFF peers=0
for argument in "$@"; do
  case "$argument" in
    --deps) deps_only=1 ;;
    --all) all=ON ;;
    --model) model=ON ;;
    --peers) peers=1 ;;
    *) echo "run.sh: unknown argument '$argument' (--deps, --all, --model, --peers)" >&2; exit 2 ;;
  esac
done

need_packages $build_packages $test_packages
if [ "$all" = ON ]; then need_packages $check_packages; fi
if [ "$deps_only" = 1 ]; then exit 0; fi

export CTEST_PARALLEL_LEVEL="${CTEST_PARALLEL_LEVEL:-$(nproc)}"
if [ "$all" = ON ]; then
  quietly cmake --preset asan
  quietly cmake --build --preset asan --target test_programs
  echo "clang with sanitizers:"
  KVEVICT_FUZZ_SECONDS="${KVEVICT_FUZZ_SECONDS:-60}" quietly ctest --preset asan && echo "  all tests passed"
fi
model_dir="$PWD/build/models/smollm2"
if [ "$model" = ON ]; then bash examples/models/smollm2.sh "$model_dir"; fi

quietly cmake --preset release -DKVEVICT_FULL_CHECKS=$all -DKVEVICT_MODEL_TESTS=$model -DKVEVICT_MODEL_DIR="$model_dir"
# Without --all the benchmarks are left for later.
if [ "$all" = ON ]; then quietly cmake --build --preset release
else quietly cmake --build --preset release --target test_programs; fi
if [ "$all" = ON ]; then
  export KVEVICT_RANDOM_PLANS="${KVEVICT_RANDOM_PLANS:-72000}" KVEVICT_INTERRUPTIONS="${KVEVICT_INTERRUPTIONS:-100}"
fi
if [ "$peers" = 1 ]; then python3 bench/peers/torch_peer.py --check; fi
ctest --preset release
