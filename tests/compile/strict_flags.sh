#!/usr/bin/env bash
# Headers that engines include compile with their flags, and what would make them wrong is refused by one message.
# Usage: strict_flags.sh COMPILER INCLUDE_DIR
set -euo pipefail
compiler=$1 include=$2
unit='#include "kvevict/cache/apply.hpp"
#include "kvevict/cache/dense.hpp"
#include "kvevict/cache/paged.hpp"
#include "kvevict/cache/ragged.hpp"
#include "kvevict/observe/observations.hpp"
#include "kvevict/policy/adakv.hpp"
#include "kvevict/policy/keydiff.hpp"
#include "kvevict/policy/knorm.hpp"
#include "kvevict/policy/pyramidkv.hpp"
#include "kvevict/policy/snapkv.hpp"
#include "kvevict/policy/streamingllm.hpp"
kvevict::EvictionPlan use(const kvevict::RaggedCache<float>& cache) {
  const auto observations = kvevict::observe_all(cache, 1.f);
  return kvevict::SnapKV{}.plan(kvevict::host_exec{}, cache, observations, kvevict::Budget::rows(4));
}'
compile() { "$compiler" -fsyntax-only -I"$include" "$@" -x c++ - <<<"$unit"; }
compile -std=c++20 -pedantic-errors -Wall -Wextra -Werror
compile -std=c++20 -pedantic-errors -fno-rtti

refused() {  # refused MESSAGE FLAGS...
  local output
  if output=$(compile "${@:2}" 2>&1); then echo "compiled with ${*:2}, but must not" >&2; exit 1; fi
  grep -q "$1" <<<"$output" || { echo "${*:2}: refused, but not for '$1':"; echo "$output" | head -20; exit 1; } >&2
}
refused 'kvevict reports NaN' -std=c++20 -ffast-math
refused 'kvevict reports NaN' -std=c++20 -ffinite-math-only
refused 'kvevict needs C++20' -std=c++17
# One message, not hundreds.
[ "$(compile -std=c++17 2>&1 | grep -c 'error:')" -le 2 ] || { echo "C++17: more than the one message" >&2; exit 1; }
