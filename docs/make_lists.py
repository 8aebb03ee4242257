#!/usr/bin/env python3
"""Writes the lists in the documents that follow from the code:

* docs/headers.md: every public header (outside detail/), with the first sentence of its comment;
* the table of presets in README.md, from naming/standard_parts.hpp.

With --check: says whether they are up to date instead."""
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
HEADERS = HERE.parent / 'include' / 'kvevict'
sys.path.insert(0, str(HERE.parent / 'tests'))
from check_rooms import rooms_of  # the order of the rooms stands in one place  # noqa: E402

TOP = '''# The public headers

Everything that can be included by name, room by room, in the order of [the architecture](architecture.md). Headers in a
`detail/` folder are not listed and may change without notice. `kvevict/kvevict.hpp` takes in what a host program
usually wants; `kvevict/config.hpp` holds the version. The sentences are the first ones of the headers themselves:
`python3 docs/make_lists.py` writes this page.
'''


def first_sentence(path):
    """The first sentence of a header's opening comment; formulas and lists, which are indented, are no part of it."""
    comment = []
    for line in path.read_text(encoding='utf-8').splitlines():
        if not line.startswith('//') or line.strip() == '//' or line.startswith('//   '):
            break
        comment.append(line[2:].strip())
    words = ' '.join(comment)
    end = re.search(r'(?<!al)(?<!e\.g)(?<!i\.e)\.(?= |$)', words)
    sentence = (words[:end.start()] if end else words).strip().rstrip(':')
    if not sentence:
        raise SystemExit(f'{path}: a public header begins with a comment that says what it is for')
    return sentence.replace('|', '\\|') + '.'


def page():
    out = [TOP]
    for room in rooms_of((HERE / 'architecture.md').read_text(encoding='utf-8')):
        folder = HEADERS / room
        if not folder.exists():
            continue
        found = [p for p in sorted(folder.rglob('*')) if p.suffix in ('.hpp', '.cuh')
                 and 'detail' not in p.relative_to(folder).parts]
        if found:
            out.append(f'## {room}\n\n| header | |\n|---|---|')
            out += [f'| `{room}/{p.relative_to(folder)}` | {first_sentence(p)} |' for p in found]
            out.append('')
    return '\n'.join(out).rstrip() + '\n'


def presets():
    """README.md with its table of presets as standard_parts.hpp has them."""
    readme = (HERE.parent / 'README.md').read_text(encoding='utf-8')
    code = (HEADERS / 'naming' / 'standard_parts.hpp').read_text(encoding='utf-8')
    rows = []
    for call in re.findall(r'add_preset\((.*?)\);', code, re.S):
        name, text, about = re.split(r',\s*(?=")', call.strip())
        # Where a text is put together, what is no literal is a file name.
        pieces = [p.strip() for p in text.split('+')]
        text = ''.join(p.strip('"') if p.startswith('"') else '(file=…)' for p in pieces)
        rows.append((name.strip('"'), text, about.strip('"')))
    table = ['| policy | is short for | |', '|---|---|---|']
    for name, text, about in rows:
        card = f'docs/policies/{name}.md'
        shown = f'[`{name}`]({card})' if (HERE.parent / card).exists() else f'`{name}`'
        table.append(f'| {shown} | `{text}` | {about} |')
    begin, end = '<!-- presets -->\n', '<!-- end of presets -->'
    if begin not in readme or end not in readme:
        raise SystemExit(f'README.md: the marks {begin.strip()} and {end} are missing')
    before, after = readme.split(begin)[0], readme.split(end)[1]
    return before + begin + '\n'.join(table) + '\n' + end + after


def main():
    stale = []
    for target, text in ((HERE / 'headers.md', page()), (HERE.parent / 'README.md', presets())):
        if target.exists() and target.read_text(encoding='utf-8') == text:
            continue
        stale.append(str(target.relative_to(HERE.parent)))
        if sys.argv[1:] != ['--check']:
            target.write_text(text, encoding='utf-8')
    if stale and sys.argv[1:] == ['--check']:
        raise SystemExit(f'{" and ".join(stale)}: not what the code says; run python3 docs/make_lists.py')


if __name__ == '__main__':
    main()
