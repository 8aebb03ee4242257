#!/usr/bin/env python3
"""No room includes a room that stands after it in docs/architecture.md.

The order is that of the table under "## The rooms". Umbrella and configuration, which stand in no room, are left out:
kvevict.hpp includes everything and config.hpp nothing. Headers under include/ of both kinds (.hpp, .cuh) are read.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ROOT / 'include' / 'kvevict'


def rooms_of(page):
    """Rooms in the order of the page's table: the first cells that read `name/`."""
    section = page.split('## The rooms', 1)[1].split('\n## ', 1)[0]
    return re.findall(r'^\| `([a-z_]+)/` ', section, re.M)


def main():
    rooms = rooms_of((ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8'))
    faults = []
    used = {p.relative_to(HEADERS).parts[0] for end in ('hpp', 'cuh') for p in HEADERS.glob(f'*/**/*.{end}')}
    for room in sorted(used - set(rooms)):
        faults.append(f'include/kvevict/{room}/ is no room of docs/architecture.md; add it to the table, in its place')
    for room in sorted(set(rooms) - used):
        faults.append(f'docs/architecture.md names the room {room}/; include/kvevict has none of that name')
    place = {room: i for i, room in enumerate(rooms)}
    headers = 0
    for path in sorted(HEADERS.rglob('*')):
        parts = path.relative_to(HEADERS).parts
        if path.suffix not in ('.hpp', '.cuh') or len(parts) < 2 or parts[0] not in place:
            continue
        headers += 1
        for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*[<"]kvevict/([a-z_]+)/', line)
            if include and place.get(include.group(1), -1) > place[parts[0]]:
                faults.append(f'{path.relative_to(ROOT)}:{number}: {parts[0]}/ includes {include.group(1)}/, which '
                              'stands after it in docs/architecture.md')
    if not headers:
        faults.append('no header was read')
    print('\n'.join(faults) if faults else f'{headers} headers of {len(rooms)} rooms include only rooms before them')
    return 1 if faults else 0


if __name__ == '__main__':
    sys.exit(main())
