#!/usr/bin/env bash
# Runs each executable that this machine can run and compares what they print with the first one's output. The one
# called native must use the widest instruction set that the processor has.
# Usage: compare_digests.sh PORTABLE OTHER...
set -euo pipefail

flags=" $(grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null | cut -d: -f2) "
has() {
  local flag
  for flag in "$@"; do [[ $flags == *" $flag "* ]] || return 1; done
}

# Whether this processor runs what the executable of this name was compiled for.
runs_here() {
  case $1 in
    *_avx2) has avx2 fma bmi1 bmi2 aes pclmulqdq ;;
    *_avx512) has avx512f avx512bw avx512cd avx512dq avx512vl ;;
    *_avx512vbmi2) has avx512f avx512bw avx512dq avx512vl avx512_vbmi2 avx512_vnni gfni vaes vpclmulqdq sha_ni ;;
    *) true ;;
  esac
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
reference=$1
"$reference" >"$work/reference"
[ -s "$work/reference" ] || { echo "$reference printed nothing" >&2; exit 1; }
failed=0
for program in "${@:2}"; do
  name=$(basename "$program")
  if ! runs_here "$name"; then
    echo "$name: compiled; this processor cannot run it"
    continue
  fi
  target=$("$program" --target)
  "$program" >"$work/other"
  if cmp -s "$work/reference" "$work/other"; then
    echo "$name: $target, equal"
  else
    echo "$name: $target, differs from $(basename "$reference"):" >&2
    diff "$work/reference" "$work/other" >&2 || true
    failed=1
  fi
  if [[ $name == *_native ]]; then
    wanted=
    if has avx2 fma bmi1 bmi2 aes pclmulqdq; then wanted=AVX2; fi
    if has avx512f avx512bw avx512cd avx512dq avx512vl; then wanted=AVX-512; fi
    if [ -n "$wanted" ] && [ "$target" != "$wanted" ]; then
      echo "$name uses $target; this processor has $wanted" >&2
      failed=1
    fi
  fi
done
exit $failed
