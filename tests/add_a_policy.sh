#!/usr/bin/env bash
# Follows CONTRIBUTING.md literally: on a copy of the tree, a patch adds a scorer with its policy. It may touch the six
# places that the page names and nothing else. What was added is then compiled and run: on the CPU, in the emulated
# CUDA block, through the registry, against the invariants of all policies; and the documents are checked with it.
# Usage: add_a_policy.sh COMPILER [flags...]
set -euo pipefail
read -r -a compiler <<<"${1:?the C++ compiler}"
shift
root=$(cd "$(dirname "$0")/.." && pwd)
name=vnorm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$root"/{include,tests,docs,examples,bench,CMakeLists.txt,README.md,CONTRIBUTING.md,CHANGELOG.md} "$work"
cd "$work"

# The six places, as the page counts them, and those of the patch.
sed -n "s|^[1-6]\. \`\([^\`]*\)\`.*|\1|p" CONTRIBUTING.md | sed "s|<name>|$name|" | LC_ALL=C sort >places
sed -n 's|^+++ b/||p' tests/add_a_policy.patch | LC_ALL=C sort >touched
[ "$(wc -l <places)" -eq 6 ] || { echo "CONTRIBUTING.md names $(wc -l <places) places; six are promised" >&2; exit 1; }
diff places touched || { echo "the patch touches other places than CONTRIBUTING.md names" >&2; exit 1; }
rm places touched

# As in a folder of its own: a repository around the copy would make git look for the paths there.
GIT_CEILING_DIRECTORIES=$(dirname "$work") git apply -C1 --recount tests/add_a_policy.patch
python3 docs/make_lists.py
python3 tests/docs/check_docs.py
python3 tests/check_rooms.py

mkdir build
cat >build/parts.cpp <<'END'
#include "cli/tool.hpp"
#include "kvevict/naming/standard_parts.hpp"
kvevict::Registry kvevict::tool::standard_parts() { return standard_registry(); }
END
cat >build/block.py <<'END'
import sys
sys.path.insert(0, 'tests/docs')
from pages import ROOT, blocks
block = blocks(ROOT / 'docs' / 'policies' / (sys.argv[1] + '.md'))[0]
lines = block.text.splitlines()
print('\n'.join(l for l in lines if l.startswith('#include')))
print('#include <doctest/doctest.h>\n#include "docs/fixture.hpp"\nTEST_CASE("the example of the card") {\nstruct Block : Fixture { void body() {')
print('\n'.join(l for l in lines if not l.startswith('#include')))
print('CHECK(cache.bytes_live() < kvevict::RaggedCache<kvevict::fp16_t>(view).bytes_live() / 4);\n} };\nBlock{}.body();\n}')
END
python3 build/block.py "$name" >build/card_test.cpp
flags=(-std=c++20 -O1 -pthread -DEIGEN_DONT_PARALLELIZE -DDOCTEST_CONFIG_SUPER_FAST_ASSERTS -Iinclude -Itests -Iexamples
       -isystem /usr/include/eigen3 -DKVEVICT_TEST_DATA="\"$work/tests/golden\"" -DKVEVICT_SOURCE_DIR="\"$work\"" "$@")
objects=()
for source in tests/main.cpp build/parts.cpp build/card_test.cpp "tests/unit/score/${name}_test.cpp" \
              tests/property/policies_test.cpp; do
  object=build/$(basename "$source").o
  "${compiler[@]}" "${flags[@]}" -c "$source" -o "$object"
  objects+=("$object")
done
"${compiler[@]}" -pthread "${objects[@]}" -o build/run
KVEVICT_PROPERTY=$name build/run
