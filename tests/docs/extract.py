#!/usr/bin/env python3
"""Makes one C++ file of all ```cpp blocks of the documents: extract.py OUT.cpp [OUT.cu]

How a block is compiled follows from the words after ```cpp:
  ```cpp         statements: the body of a function, where the names of fixture.hpp are known
  ```cpp run     the same, and the program calls it
  ```cpp scope   declarations, at namespace scope; later blocks of the page know them
  ```cpp cuda    goes into OUT.cu, as statements
  ```cpp from:F  nothing to compile: the lines stand in the file F, which a test builds (check_docs.py looks)
Includes of a block are moved to the top. An error of the compiler names the line of the document.
"""
import pathlib
import re
import sys

from pages import blocks, pages, ROOT


def main():
    target = pathlib.Path(sys.argv[1])
    device = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    includes, bodies, device_includes, device_bodies, calls = [], [], [], [], []
    for page in pages():
        name = re.sub(r'\W', '_', str(page.relative_to(ROOT))).lower()
        page_bodies = []
        for i, block in enumerate(b for b in blocks(page) if b.language == 'cpp' and not b.source):
            unknown = block.marks - {'run', 'scope', 'cuda'}
            if unknown:
                raise SystemExit(f'{block.where}: unknown words after ```cpp: {" ".join(sorted(unknown))}')
            lines = block.text.splitlines()
            on_device = 'cuda' in block.marks
            for number, line in enumerate(lines):
                if line.startswith('#include'):
                    (device_includes if on_device else includes).append(line)
                    lines[number] = ''
            text = f'#line {block.line} "{block.page}"\n' + '\n'.join(lines) + '\n'
            if 'scope' not in block.marks:
                text = f'struct block_{i} : Fixture {{ void body() {{\n{text}}} }};\n'
            if on_device:
                device_bodies.append(f'namespace {name} {{\n{text}}}\n')
            else:
                page_bodies.append(text)
            if 'run' in block.marks:
                calls.append(f'  run<{name}::block_{i}>("{block.where}");\n')
        if page_bodies:
            bodies.append(f'namespace {name} {{\n{"".join(page_bodies)}}}\n')
    unique = '\n'.join(dict.fromkeys(includes))
    # Blocks are examples: they name things that they do not use, and names of the fixture again.
    quiet = ''.join(f'#pragma GCC diagnostic ignored "-W{w}"\n'
                    for w in ('shadow', 'unused-variable', 'unused-but-set-variable'))
    target.write_text(f'{unique}\n#include "docs/fixture.hpp"\n{quiet}\n{"".join(bodies)}\n#line 1 "main"\n'
                      f'int main() {{\n{"".join(calls)}  return failed;\n}}\n', encoding='utf-8')
    if device:
        unique = '\n'.join(dict.fromkeys(device_includes))
        device.write_text(f'{unique}\n#include "docs/cuda_fixture.hpp"\n\n{"".join(device_bodies)}', encoding='utf-8')


if __name__ == '__main__':
    main()
