#!/usr/bin/env bash
# Small promises that are easily broken: versions agree, headers have a guard and stay readable.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0
say() { echo "$1" >&2; failed=1; }

number() { sed -n "s/^#define KVEVICT_VERSION_$1 //p" include/kvevict/config.hpp; }
version="$(number MAJOR).$(number MINOR).$(number PATCH)"
grep -q "^## \[$version\]\|^## \[Unreleased\]" CHANGELOG.md || say "CHANGELOG.md does not mention version $version"

while read -r header; do
  grep -q '^#pragma once' "$header" || say "$header: no #pragma once"
  [ "$(wc -l <"$header")" -le 400 ] || say "$header: over 400 lines; does it hold one idea?"
done < <(find include -name '*.hpp' -o -name '*.cuh')
exit $failed
