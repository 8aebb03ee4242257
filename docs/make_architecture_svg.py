#!/usr/bin/env python3
"""Draws docs/architecture.svg from docs/architecture.txt. With --check: says whether the file is up to date instead."""
import html
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
HEADERS = HERE.parent / 'include' / 'kvevict'
# All lengths in pixels.
COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT, MARGIN = 340, 140, 226, 58, 24
STYLE = ('text{font-family:sans-serif;font-size:14px;fill:#1b1f24}.t{font-weight:bold;font-size:15px}.s{font-size:12px;'
         'fill:#4b5560}.f{font-family:monospace;font-size:12px;fill:#0b5394}.b{fill:#f3f6fa;stroke:#33475b;'
         'stroke-width:1.3}.g{fill:#fffaf0;stroke:#b58900;stroke-dasharray:6 4}.a{stroke:#33475b;stroke-width:1.3;'
         'fill:none;marker-end:url(#tip)}.l{fill:#fff;fill-opacity:.92}')


def read(text):
    """The description as ({name: box}, [frame], [arrow]); each a list of its fields."""
    boxes, frames, arrows = {}, [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith('#'):
            continue
        kind, rest = line.split(None, 1)
        fields = [field.strip() for field in rest.split('|')]
        if kind == 'box' and len(fields) == 5:
            boxes[fields[0]] = [float(fields[1]), float(fields[2])] + fields[3:]
        elif kind == 'frame' and len(fields) == 6:
            frames.append([float(f) for f in fields[:4]] + fields[4:])
        elif kind == 'arrow' and len(fields) in (3, 4):
            ends = [end.strip() for end in fields[0].split('->')]
            arrows.append(ends + fields[1:3] + [float(fields[3]) if len(fields) == 4 else 0.5])
        else:
            raise SystemExit(f'architecture.txt:{number}: not a box, frame or arrow with all of its fields: {line}')
    for first, last, *_ in arrows:
        for end in (first, last):
            if end not in boxes:
                raise SystemExit(f'architecture.txt: an arrow names the box {end}, which there is not')
    for name in [a[3] for a in arrows] + [f[5] for f in frames]:
        if not (HEADERS / name).exists():
            raise SystemExit(f'architecture.txt: include/kvevict/{name} does not exist')
    return boxes, frames, arrows


def center(box):
    return MARGIN + BOX_WIDTH / 2 + box[0] * COLUMN, MARGIN + BOX_HEIGHT / 2 + box[1] * ROW


def border(start, towards):
    """Where the line from the middle of a box towards another leaves the box."""
    dx, dy = towards[0] - start[0], towards[1] - start[1]
    share = min(BOX_WIDTH / 2 / abs(dx) if dx else 1e9, BOX_HEIGHT / 2 / abs(dy) if dy else 1e9)
    return start[0] + dx * share, start[1] + dy * share


def text(x, y, words, style, anchor='middle'):
    return f'<text class="{style}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def draw(description):
    boxes, frames, arrows = read(description)
    width = 2 * MARGIN + BOX_WIDTH + max(b[0] for b in boxes.values()) * COLUMN
    height = 2 * MARGIN + BOX_HEIGHT + max(b[1] for b in boxes.values()) * ROW
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
           f'height="{height:.0f}" role="img" aria-label="The way of the data through kvevict">',
           '<!-- Made by docs/make_architecture_svg.py from docs/architecture.txt; change these instead. -->',
           f'<style>{STYLE}</style>',
           '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
           'orient="auto"><path d="M0 0L10 5L0 10z" fill="#33475b"/></marker></defs>',
           f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>']
    for first_column, first_row, last_column, last_row, title, file in frames:
        x, y = center([first_column, first_row])
        x2, y2 = center([last_column, last_row])
        left, top = x - BOX_WIDTH / 2 - 14, y - BOX_HEIGHT / 2 - 16
        w, h = x2 - x + BOX_WIDTH + 28, y2 - y + BOX_HEIGHT + 32
        out.append(f'<rect class="g" x="{left:.0f}" y="{top:.0f}" width="{w:.0f}" height="{h:.0f}" rx="10"/>')
        out.append(text(left + 14, top + h - 28, title, 's', 'start'))
        out.append(text(left + 14, top + h - 12, file, 'f', 'start'))
    lines, labels = [], []
    for first, last, words, file, place in arrows:
        a, b = center(boxes[first]), center(boxes[last])
        a, b = border(a, b), border(b, a)
        lines.append(f'<path class="a" d="M{a[0]:.0f} {a[1]:.0f}L{b[0]:.0f} {b[1]:.0f}"/>')
        x, y = a[0] + (b[0] - a[0]) * place, a[1] + (b[1] - a[1]) * place
        w = max(6.6 * len(words), 7.4 * len(file)) + 10
        labels.append(f'<rect class="l" x="{x - w / 2:.0f}" y="{y - 16:.0f}" width="{w:.0f}" height="34" rx="4"/>')
        labels.append(text(x, y - 2, words, 's'))
        labels.append(text(x, y + 13, file, 'f'))
    out += lines + labels
    for box in boxes.values():
        x, y = center(box)
        out.append(f'<rect class="b" x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" '
                   f'height="{BOX_HEIGHT}" rx="8"/>')
        out.append(text(x, y - 4, box[2], 't'))
        out.append(text(x, y + 16, box[3], 's'))
    return '\n'.join(out + ['</svg>']) + '\n'


def main():
    drawn = draw((HERE / 'architecture.txt').read_text(encoding='utf-8'))
    target = HERE / 'architecture.svg'
    if sys.argv[1:] == ['--check']:
        if not target.exists() or target.read_text(encoding='utf-8') != drawn:
            raise SystemExit('docs/architecture.svg is not what docs/architecture.txt says; run '
                             'python3 docs/make_architecture_svg.py')
    else:
        target.write_text(drawn, encoding='utf-8')


if __name__ == '__main__':
    main()
