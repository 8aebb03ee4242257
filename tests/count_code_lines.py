#!/usr/bin/env python3
"""Counts the code lines of a folder's C++ and CUDA files: comments and blank lines apart.

usage: count_code_lines.py [FOLDER]      include/ of this repository by default; one line per room and the sum
       count_code_lines.py --at COMMIT   the same of include/ as it was at a commit
"""
import collections
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A comment, or a string or character that may contain what looks like one. Digit separators are no characters.
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)


def code_lines(text):
    """Lines that hold something besides comments and white space."""
    def without_comment(match):
        token = match.group()
        return re.sub(r'[^\n]', ' ', token) if token.startswith('/') else token
    return sum(1 for line in TOKEN.sub(without_comment, text).split('\n') if line.strip())


def count(folder):
    """{room: code lines}, by the folder below include/kvevict, or '' where there is none."""
    counts = collections.Counter()
    for path in sorted(folder.rglob('*')):
        if path.suffix in ('.hpp', '.cuh', '.cpp', '.cu', '.h'):
            parts = path.relative_to(folder).parts[:-1]
            room = next((p for p in parts if p != 'kvevict'), '')
            counts[room] += code_lines(path.read_text(encoding='utf-8'))
    return counts


def main(arguments):
    if arguments[:1] == ['--at']:
        with tempfile.TemporaryDirectory() as work:
            archive = subprocess.run(['git', 'archive', arguments[1], 'include'], cwd=ROOT, check=True,
                                     stdout=subprocess.PIPE).stdout
            tar = pathlib.Path(work) / 'include.tar'
            tar.write_bytes(archive)
            with tarfile.open(tar) as files:
                files.extractall(work)
            counts = count(pathlib.Path(work) / 'include')
    else:
        counts = count(pathlib.Path(arguments[0]) if arguments else ROOT / 'include')
    for room, lines in sorted(counts.items()):
        print(f'{lines:7} {room or "(top)"}')
    print(f'{sum(counts.values()):7} in all')


if __name__ == '__main__':
    main(sys.argv[1:])
