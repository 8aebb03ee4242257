#!/usr/bin/env bash
# Whether two commits behave the same: builds the digest tools of this folder against the headers of both, with the same
# compiler and flags, and compares what they print, line for line. Lines that are meant to differ are named in
# intended_changes.txt.
# Usage: compare_commits.sh BASE [HEAD]     HEAD: a commit, or nothing for the working tree
# CXX        the compiler (g++); "ccache g++" works
# PIN_PATHS  what is compared ("portable simd cuda")
# PIN_KEEP   a folder that keeps the outputs (BASE-portable.txt and so on)
set -euo pipefail
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
top=$(git -C "$here" rev-parse --show-toplevel)
paths=${PIN_PATHS:-portable simd cuda}
work=$(mktemp -d)
cleanup() {
  for tree in "$work"/tree-*; do
    [ ! -d "$tree" ] || git -C "$top" worktree remove --force "$tree" || true
  done
  rm -rf "$work"
}
trap cleanup EXIT
keep=${PIN_KEEP:-$work/out}
mkdir -p "$keep" "$work/include"
ln -s "$here" "$work/include/pin"

checkout() {  # name commit: prints the folder
  git -C "$top" worktree add --quiet --detach "$work/tree-$1" "$2" >&2
  echo "$work/tree-$1"
}
base=$(checkout base "$1")
if [ $# -eq 2 ]; then head=$(checkout head "$2"); else head=$top; fi

read -ra compiler <<<"${CXX:-g++}"
eigen=$(pkg-config --cflags-only-I eigen3 2>/dev/null | sed 's/^ *-I//; s/ *$//')
common=(-std=c++20 -O2 -w -DEIGEN_DONT_PARALLELIZE -I"$work/include" -isystem "${eigen:-/usr/include/eigen3}")

output() {  # name tree path: writes keep/name-path.txt; both commits read the older one's recording
  local program=$work/$1-$3 flags=()
  case $3 in
    # Which product and sum become one instruction is the compiler's choice, and changes when code moves; the portable
    # path is compared as it is written.
    portable) flags=(-march=native -ffp-contract=off -fopenmp -DKVEVICT_PORTABLE -I"$2/include"
                     "$here/behaviour_digest.cpp") ;;
    simd) flags=(-march=native -fopenmp -I"$2/include" "$here/behaviour_digest.cpp") ;;
    cuda)
      perl "$here/emulated/emulate_cuda.pl" "$2/include" "$work/$1-emulated"
      flags=(-DKVEVICT_PIN_CUDA -DKVEVICT_PORTABLE -I"$here/emulated" -I"$work/$1-emulated" -I"$2/include"
             -I"$2/tests" "$here/cuda_digest.cpp") ;;
    *) echo "unknown path: $3" >&2; return 1 ;;
  esac
  # One place that no longer fits is named from many templates; the first lines say which.
  if ! "${compiler[@]}" "${common[@]}" "${flags[@]}" -o "$program" 2>"$program.log"; then
    grep -m 10 'error' "$program.log" >&2
    return 1
  fi
  # Threads that wait must not take the processor from those that work, on a machine with fewer than seven.
  OMP_WAIT_POLICY=passive "$program" "$base/examples/data" >"$keep/$1-$3.txt"
}

failed=0
for path in $paths; do
  output base "$base" "$path" & first=$!
  output head "$head" "$path" & second=$!
  ran=1
  wait $first || { echo "$path: the tool failed at $1" >&2; ran=0; }
  wait $second || { echo "$path: the tool failed at ${2:-the working tree}; api.hpp may not know it yet" >&2; ran=0; }
  [ $ran = 1 ] || { failed=1; continue; }
  awk -v path="$path" -v most=40 '
    FILENAME == ARGV[1] {
      at = index($0, " # ")
      if ($0 !~ /^#/ && at) patterns[++count] = substr($0, 1, at - 1)
      next
    }
    {
      at = index($0, " : ")
      name = substr($0, 1, at - 1); result = substr($0, at + 3)
      if (FILENAME == ARGV[2]) before[name] = result
      else after[name] = result
      names[name]
    }
    function meant(line,   i) {
      for (i = 1; i <= count; ++i)
        if (line ~ patterns[i]) { used[i]++; return 1 }
      return 0
    }
    END {
      for (name in names) {
        was = (name in before) ? before[name] : "no such line"
        is = (name in after) ? after[name] : "no such line"
        if (was == is) { ++equal; continue }
        if (meant(path ": " name)) { ++intended; continue }
        if (++wrong <= most) printf "%s: %s\n  was %s\n  is  %s\n", path, name, was, is
      }
      for (i = 1; i <= count; ++i)
        if (used[i]) printf "%s: %d lines differ as meant: %s\n", path, used[i], patterns[i]
      printf "%s: %d lines equal, %d differ as meant, %d differ\n", path, equal, intended, wrong
      exit wrong > 0
    }' "$here/intended_changes.txt" "$keep/base-$path.txt" "$keep/head-$path.txt" || failed=1
done
exit $failed
