"""The documents of this repository and the code blocks in them."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def pages():
    """README, CONTRIBUTING and everything under docs/, in order."""
    return [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md'] + sorted((ROOT / 'docs').rglob('*.md'))


class Block:
    """A fenced block: its page, the line of its first line of text, the words after the fence, and its text."""

    def __init__(self, page, line, words, text):
        self.page, self.line, self.text = page, line, text
        self.language, self.marks = (words[0] if words else ''), set(words[1:])
        self.source = next((m[5:] for m in self.marks if m.startswith('from:')), None)  # a file that holds the lines

    @property
    def where(self):
        return f'{self.page.relative_to(ROOT)}:{self.line}'


def blocks(page):
    out, inside, words, start, lines = [], None, [], 0, []
    for number, line in enumerate(page.read_text(encoding='utf-8').splitlines(), 1):
        fence = re.match(r'^( *)(```+)(.*)$', line)
        if inside is None and fence:
            inside, words, start, lines = fence.group(2), fence.group(3).split(), number + 1, []
        elif inside is not None and fence and fence.group(2) == inside and not fence.group(3).strip():
            out.append(Block(page, start, words, '\n'.join(lines) + '\n'))
            inside = None
        elif inside is not None:
            lines.append(line)
    if inside is not None:
        raise SystemExit(f'{page.relative_to(ROOT)}: the block at line {start - 1} is not closed')
    return out


def without_blocks(text):
    """The prose of a page, line numbers kept."""
    return re.sub(r'^```.*?^```$', lambda m: '\n' * m.group().count('\n'), text, flags=re.S | re.M)
