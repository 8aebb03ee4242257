#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, in under six minutes: correctness against the CPU, a short run under
# compute-sanitizer, timings against the bytes that have to move, a torch comparison where torch is there. Prints one
# table and writes JSON. Exit code 77 where there is no device.
#
#   device_check.sh [--tests-only] [--build DIR] [--nvcc NVCC] [--json FILE]
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/cuda
json=
tests_only=0
nvcc=
while [ $# -gt 0 ]; do
  case $1 in
    --tests-only) tests_only=1 ;;
    --build) build=$2; shift ;;
    --nvcc) nvcc=$2; shift ;;
    --json) json=$2; shift ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
[ -n "$nvcc" ] || nvcc=$(command -v nvcc || echo "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc")
[ -n "$json" ] || json=$build/device_check.json
if ! nvidia-smi -L 2> /dev/null | grep -q GPU; then
  echo "device_check: no CUDA device on this machine; nothing was run"
  exit 77
fi
[ -x "$nvcc" ] || { echo "device_check: no nvcc at $nvcc" >&2; exit 1; }
mkdir -p "$build"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
flags=(-std=c++20 -O2 -arch="sm_$capability" -I"$root/include" -I"$here")
started=$SECONDS
status=0

echo "== build (sm_$capability)"
compile() { "$nvcc" "${flags[@]}" "$1" -o "$2" || { echo "device_check: $1 does not compile" >&2; exit 1; }; }
compile "$here/device_test.cu" "$build/device_test" &
first=$!
if [ $tests_only = 0 ]; then
  compile "$root/bench/cuda/device_bench.cu" "$build/device_bench" &
  second=$!
  wait $second || exit 1
fi
wait $first || exit 1
echo "   $((SECONDS - started)) s"

echo "== correctness against the CPU"
timeout 120 "$build/device_test" || status=1

sanitizer=$(command -v compute-sanitizer || ls "$(dirname "$nvcc")/compute-sanitizer" 2> /dev/null)
if [ -n "$sanitizer" ]; then
  for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool, small run"
    timeout 100 "$sanitizer" --tool $tool --error-exitcode 1 "$build/device_test" --small || status=1
  done
else
  echo "== compute-sanitizer: not installed, not run"
fi
[ $tests_only = 1 ] && { echo "== $((SECONDS - started)) s"; exit $status; }

echo "== timings"
timeout 90 "$build/device_bench" "$json" || status=1
if python3 -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null; then
  timeout 60 python3 "$root/bench/cuda/torch_compare.py" "$json" || status=1
else
  echo "torch: not there, not compared"
fi
echo "== $((SECONDS - started)) s, $json"
exit $status
