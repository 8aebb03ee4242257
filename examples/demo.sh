#!/usr/bin/env bash
# From nothing to the main result: installs what is missing, builds the tool, and compares the policies on the recorded
# dump that comes with the project. Arguments are passed on to `kvevict compare`.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/deps.sh
need_packages $build_packages
quietly cmake --preset release -DKVEVICT_BUILD_TESTS=OFF -DKVEVICT_BUILD_BENCH=OFF -B build/demo
quietly cmake --build build/demo --target kvevict_tool
if [ $# -gt 0 ]; then
  exec build/demo/bin/kvevict compare "$@"
fi
exec build/demo/bin/kvevict compare --retain 0.05,0.15,0.3,0.5 --policy \
  'full,oracle,random,streamingllm,knorm,keydiff,expected,snapkv,snapkv-kvpress,pyramidkv,adakv,ada<pyramid>/snapkv,lkv,lkv-paper'
