#!/usr/bin/env bash
# Each wrong/*.cpp must be refused by the compiler, for the reason on its first line ("// error: REGEX"); with
# -DRIGHT the same file must compile, so that it is the named fault that is refused.
# Usage: must_not_compile.sh COMPILER INCLUDE_DIR
set -uo pipefail
compiler=$1 include=$2 failed=0
for unit in "$(dirname "$0")"/wrong/*.cpp; do
  reason=$(sed -n '1s|^// error: ||p' "$unit")
  if ! "$compiler" -std=c++20 -fsyntax-only -DRIGHT -I"$include" "$unit"; then
    echo "$unit: the right form does not compile" >&2
    failed=1
  fi
  if output=$("$compiler" -std=c++20 -fsyntax-only -I"$include" "$unit" 2>&1); then
    echo "$unit: compiled, but must not" >&2
    failed=1
  elif ! grep -qE "$reason" <<<"$output"; then
    echo "$unit: refused, but not for '$reason':" >&2
    echo "$output" >&2
    failed=1
  fi
done
exit $failed
