#!/usr/bin/env bash
# Objects of several instruction sets in one program: linked in any order each runs its own code and all plan the same;
# no function of the library is shared between them; and types passed from one to the other are a link error.
# Usage: mixed_instruction_sets.sh COMPILER INCLUDE_DIR
set -euo pipefail
compiler=$1 include=$(readlink -f "$2") here=$(dirname "$(readlink -f "$0")")/mixed
case $(uname -m) in x86_64) ;; *) echo "only on x86-64"; exit 77 ;; esac
grep -q avx2 /proc/cpuinfo || { echo "this processor has no AVX2"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
echo '#include <hwy/highway.h>' | "$compiler" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || { echo "no Highway"; exit 77; }

build() { "$compiler" -std=c++20 -O2 -pthread -I"$include" "${@:2}" -c "$here/$1.cpp"; }
build part -DPART=baseline -o baseline.o
build part -DPART=fast -march=haswell -maes -mpclmul -o fast.o
build part -DPART=portable -march=haswell -maes -mpclmul -DKVEVICT_PORTABLE -o portable.o
build main -o main.o

symbols() { nm --defined-only "$1" | awk '$3 ~ /kvevict/ { print $3 }' | sort -u; }
for pair in "baseline fast" "baseline portable" "fast portable"; do
  set -- $pair
  [ -n "$(symbols "$1.o")" ] || { echo "$1.o: no function of the library to compare" >&2; exit 1; }
  shared=$(comm -12 <(symbols "$1.o") <(symbols "$2.o"))
  [ -z "$shared" ] || { echo "$1.o and $2.o share:"; echo "$shared" | head; exit 1; } >&2
done
if objdump -d baseline.o | grep -q '%ymm'; then echo "baseline.o holds AVX code" >&2; exit 1; fi

for order in "baseline fast portable" "baseline portable fast" "fast baseline portable" "fast portable baseline" \
             "portable baseline fast" "portable fast baseline"; do
  "$compiler" main.o $(printf '%s.o ' $order) -pthread -o program
  ./program || { echo "linked as '$order': exit code $?" >&2; exit 1; }
done

# One ABI links; another does not, in each setting that counts.
build wrong_call -o caller.o
build wrong_call -DDEFINE -o same.o
"$compiler" caller.o same.o -o program
for setting in -mavx2 -mavx512bf16 -DKVEVICT_PORTABLE; do
  build wrong_call -DDEFINE $setting -o other.o
  if "$compiler" caller.o other.o -o program 2>/dev/null; then
    echo "a call into an object compiled with $setting links, but must not" >&2
    exit 1
  fi
done
