#!/usr/bin/env python3
"""What documents promise without compiling: links and paths exist, generated pages are up to date, options and programs
are the real ones, and blocks of other languages than C++ are well formed. With the folder of the built programs as an
argument, commands are checked against the tool's own help, and ```sh run blocks are run."""
import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from pages import ROOT, blocks, pages, without_blocks

SUFFIXES = 'hpp|cuh|cpp|cu|py|sh|md|json|safetensors|tsv|txt|svg|supp'
# Where a path in the text may begin, besides the page's own folder.
STARTS = [ROOT, ROOT / 'include', ROOT / 'include' / 'kvevict', ROOT / 'examples', ROOT / 'docs']
faults = []


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r'^#+ +(.*)$', without_blocks(page.read_text(encoding='utf-8')), re.M)
    return {re.sub(r'[^\w\- ]', '', head.lower()).strip().replace(' ', '-') for head in heads}


def check_paths(page):
    text = without_blocks(page.read_text(encoding='utf-8'))
    name = page.relative_to(ROOT)
    for number, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r'\]\(([^)\s]+)\)', line):
            if re.match(r'[a-z]+:', target):
                continue
            path, _, anchor = target.partition('#')
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                faults.append(f'{name}:{number}: the link {target} leads nowhere')
            elif anchor and anchor not in anchors(file):
                faults.append(f'{name}:{number}: {file.name} has no heading for #{anchor}')
        for path in re.findall(rf'`((?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES}))`', line):
            if path.startswith(('build/', 'my_', 'your_')):  # what a reader makes
                continue
            if not any((start / path).exists() for start in STARTS + [page.parent]):
                faults.append(f'{name}:{number}: the file {path} does not exist')


def check_generated():
    for script in ('make_architecture_svg.py', 'make_lists.py'):
        done = subprocess.run([sys.executable, ROOT / 'docs' / script, '--check'], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            faults.append(done.stderr.strip())


def check_options():
    """README lists exactly the options that CMakeLists.txt has."""
    cmake = (ROOT / 'CMakeLists.txt').read_text(encoding='utf-8')
    real = set(re.findall(r'^(?:option\(|set\()(KVEVICT_\w+)', cmake, re.M))
    real = {o for o in real if re.search(rf'option\({o}\b|set\({o} .*CACHE', cmake)}
    said = set(re.findall(r'^\| `(KVEVICT_\w+)`', (ROOT / 'README.md').read_text(encoding='utf-8'), re.M))
    for option in sorted(real - said):
        faults.append(f'README.md: the option {option} of CMakeLists.txt is not listed')
    for option in sorted(said - real):
        faults.append(f'README.md: lists the option {option}, which CMakeLists.txt does not have')


def check_programs(page, programs):
    """Programs that a page names are built by the presets that the README names."""
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    for number, line in enumerate(page.read_text(encoding='utf-8').splitlines(), 1):
        for preset, program in re.findall(r'\bbuild/(\w+)/bin/(\w+)', line):
            if preset != 'demo' and f'--build --preset {preset}' not in readme:
                faults.append(f'{page.relative_to(ROOT)}:{number}: no command of the README builds build/{preset}')
            if program not in programs:
                faults.append(f'{page.relative_to(ROOT)}:{number}: there is no program {program}')


def program_names():
    out = set()
    for file in [ROOT / 'examples' / 'CMakeLists.txt', ROOT / 'bench' / 'CMakeLists.txt'] + \
            list((ROOT / 'examples').glob('*/CMakeLists.txt')):
        text = file.read_text(encoding='utf-8')
        out |= set(re.findall(r'add_executable\((\w+)', text)) | set(re.findall(r'OUTPUT_NAME (\w+)', text))
    return out


def commands(block):
    """The commands of a shell block, with continued lines joined and prompts, comments and pipes taken apart."""
    text = re.sub(r'\\\n', ' ', block.text)
    for line in text.splitlines():
        line = re.sub(r'(^|\s)#.*', '', line).strip()
        for command in re.split(r'&&|\|(?!\|)|;', line):
            if command.strip():
                yield command.strip()


def check_tool_options(block, tool, known):
    for command in commands(block):
        words = re.sub(r"'[^']*'|\"[^\"]*\"", '_', command).split()
        if not words or not re.fullmatch(r'(.*/)?kvevict', words[0]):
            continue
        sub = next((w for w in words[1:] if not w.startswith('-')), '')
        path = [sub] + (['lkv'] if sub == 'train' else [])
        if sub not in known:
            done = subprocess.run([tool] + path + ['--help'], stdout=subprocess.PIPE, text=True)
            known[sub] = done.stdout if done.returncode == 0 else ''
            if not known[sub]:
                faults.append(f'{block.where}: kvevict has no command {sub}')
        for option in re.findall(r'(?<=\s)(--[a-z-]+)', ' ' + ' '.join(words)):
            if not re.search(rf'{option}\b(?!-)', known[sub]):
                faults.append(f'{block.where}: kvevict {sub} has no option {option}')


def run_shell(block, programs):
    """Runs a block in a folder that looks like this repository after a build."""
    with tempfile.TemporaryDirectory() as work:
        os.makedirs(f'{work}/build/release')
        os.symlink(programs, f'{work}/build/release/bin')
        for name in ('examples', 'docs', 'tests'):
            os.symlink(ROOT / name, f'{work}/{name}')
        done = subprocess.run(['bash', '-euo', 'pipefail', '-c', block.text], cwd=work, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            faults.append(f'{block.where}: exits with {done.returncode}:\n{done.stdout}')
        return done.stdout


def check_source(block):
    """The lines of the block stand in the file that it names; `// ...` stands for lines that are left out."""
    file = ROOT / block.source
    if not file.exists():
        faults.append(f'{block.where}: the file {block.source} does not exist')
        return
    text = ' '.join(file.read_text(encoding='utf-8').split())
    for part in re.split(r'^\s*// \.\.\.$', block.text, flags=re.M):
        if ' '.join(part.split()) not in text:
            faults.append(f'{block.where}: these lines are not those of {block.source}:\n{part.strip()}')


def check_block(block, tool, known):
    try:
        if block.source:
            check_source(block)
        elif block.language == 'json':
            json.loads(block.text)
        elif block.language in ('python', 'py'):
            ast.parse(block.text)
        elif block.language in ('sh', 'bash'):
            done = subprocess.run(['bash', '-n'], input=block.text, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                faults.append(f'{block.where}: {done.stderr.strip()}')
            if tool:
                check_tool_options(block, tool, known)
                if 'run' in block.marks:
                    run_shell(block, tool.parent)
        elif block.language not in ('', 'cpp', 'text', 'cmake'):
            faults.append(f'{block.where}: nothing checks blocks of {block.language}')
    except (ValueError, SyntaxError) as error:
        faults.append(f'{block.where}: {error}')


def check_table(tool):
    """The table of the README is what the tool prints: the same rows, to the last digit but one."""
    page = ROOT / 'README.md'
    table = next((b for b in blocks(page) if b.text.startswith('policy ')), None)
    if table is None:
        faults.append('README.md: there is no table of policies')
        return
    said = {}
    for line in table.text.splitlines()[1:]:
        if not line.startswith('-'):
            cells = re.sub('[*#]', ' ', line).split()
            said[cells[0]] = [float(c) for c in cells[1:]]
    done = subprocess.run([tool, 'compare', '--quiet', '--format', 'json', '--retain', '0.15', '--policy',
                           ','.join(said)], stdout=subprocess.PIPE, text=True, check=True)
    found = {row['policy']: row for row in json.loads(done.stdout)['rows'] if row['policy'] in said}
    for policy, cells in said.items():
        row = found[policy]
        real = [row['retain'], row['rows_kept'], row['bytes_live'] / 2**20, row['bytes_reserved'] / 2**20,
                row['mass_recall'], row['output_error'], row['oracle_gap']]
        bounds = [1e-9, 0.5, 0.006, 0.006, 1e-3, 1e-3, 1e-3]
        if len(cells) != len(real) or any(abs(a - b) > e for a, b, e in zip(cells, real, bounds)):
            faults.append(f'README.md: {policy} is {cells} in the table, {[round(x, 4) for x in real]} now')


def check_press_table(tool):
    """Every policy text that docs/kvpress.md gives for a press builds a policy that plans."""
    page = (ROOT / 'docs' / 'kvpress.md').read_text(encoding='utf-8')
    texts = []
    for line in page.splitlines():
        cells = line.split('|')
        if re.match(r'\| `\w+Press\(', line) and len(cells) == 5:
            texts += [t for cell in cells[2:4] for t in re.findall(r'`([^`]+)`', cell)]
    if len(texts) < 10:
        faults.append('docs/kvpress.md: the table of presses was not found')
        return
    done = subprocess.run([tool, 'compare', '--quiet', '--format', 'json', '--retain', '0.5', '--policy',
                           ','.join(texts)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = json.loads(done.stdout)['rows'] if done.returncode == 0 else []
    measured = {row['policy'] for row in rows if not row.get('error')}
    for text in texts:
        if text not in measured:
            faults.append(f'docs/kvpress.md: {text} was not measured: {done.stderr.strip()}')


def main():
    tool = pathlib.Path(sys.argv[1]).resolve() / 'kvevict' if len(sys.argv) > 1 else None
    programs, known, count = program_names(), {}, 0
    for page in pages():
        check_paths(page)
        check_programs(page, programs)
        for block in blocks(page):
            count += 1
            check_block(block, tool, known)
    check_generated()
    check_options()
    if tool:
        check_table(tool)
        check_press_table(tool)
    print('\n'.join(faults) if faults else f'{len(pages())} pages and {count} blocks hold')
    return 1 if faults else 0


if __name__ == '__main__':
    sys.exit(main())
