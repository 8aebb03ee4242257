#!/usr/bin/env bash
# run.sh PROGRAM [SECONDS]: one fuzz target in a folder of its own beside the program; the corpus there grows from run
# to run. Ends with the number of executions; on a finding with its report and the input that shows it.
set -euo pipefail
program=$(realpath "$1") seconds=${2:-${KVEVICT_FUZZ_SECONDS:-5}}
folder="$(dirname "$program")/fuzz/$(basename "$program")"
mkdir -p "$folder/corpus"
cd "$folder"
if ! "$program" -max_total_time="$seconds" -seed="${KVEVICT_FUZZ_SEED:-0}" -max_len=16384 -len_control=0 \
     -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 -use_value_profile=1 -verbosity=1 corpus >log 2>&1; then
  grep -v '^#' log | head -100 >&2
  echo "$folder holds the input (crash-*, oom-*, timeout-*)" >&2
  exit 1
fi
grep -E 'number_of_executed_units|average_exec_per_sec|peak_rss_mb' log
