#!/usr/bin/env python3
"""Turns the JSON of kvevict_bench, and of peers that write the same shape, into Markdown tables of ratios.

    kvevict_bench --benchmark_format=json --benchmark_repetitions=5 >bench.json
    bench/peers/torch_peer.py >torch.json             # where torch is installed
    bench/report.py bench.json [torch.json ...] >tables.md

Names are operation/implementation/size. Absolute times stay out: they belong to one machine at one moment. For each
size the table says how many times longer the other implementations take than ours, and which part of a bound (a bare
read, a copy, the multiply-add peak) ours reaches. Medians of the repetitions; the spread is (largest - least) / median.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

OURS = "kvevict"
BOUNDS = ("memcpy",)  # and everything that ends with _floor
THREADS = ".threads"  # operation.threads2: the same with two threads
WALL = " wall"


def is_bound(implementation):
    return implementation.endswith("_floor") or implementation in BOUNDS


def read(paths):
    """Contexts in order, and times in ns: {operation: {size: {implementation: [repetitions]}}}.

    Processor time, which other work on the machine disturbs least; wall time where several threads share the work, and
    for its one-thread twin under the name operation + WALL.
    """
    contexts, times = [], {}
    scale = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
    for path in paths:
        data = json.loads(Path(path).read_text())
        contexts.append(data.get("context", {}))
        runs = [b for b in data["benchmarks"] if b.get("run_type", "iteration") == "iteration"]
        medians = [b for b in data["benchmarks"] if b.get("aggregate_name") == "median"]
        for run in runs or medians:
            if run.get("error_occurred"):
                continue
            parts = run.get("run_name", run["name"]).split("/")
            if len(parts) < 3:
                continue
            operation, implementation, size = parts[0], "/".join(parts[1:-1]), parts[-1]
            unit = scale[run.get("time_unit", "ns")]
            parallel = THREADS in operation or run.get("threads", 1) > 1
            for name, value in ((operation, run["real_time" if parallel else "cpu_time"]),
                                (operation + WALL, run["real_time"])):
                by_size = times.setdefault(name, {}).setdefault(size, {})
                by_size.setdefault(implementation, []).append(value * unit)
    return contexts, times


def size_order(size):
    return (0, int(size), "") if size.isdigit() else (1, 0, size)


def in_words(size):
    if size.isdigit():
        value = int(size)
        for unit, name in ((1 << 20, "Mi"), (1 << 10, "Ki")):
            if value >= unit and value % unit == 0:
                return f"{value // unit} {name}"
    return size


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def in_order(implementations):
    return list(dict.fromkeys(implementations))


def against_others(by_size):
    """One row per size and implementation of ours: ratios of the others, shares of the bounds, spread."""
    names = in_order(name for runs in by_size.values() for name in runs)
    ours = [n for n in names if n.startswith(OURS)]
    others = [n for n in names if not n.startswith(OURS) and not is_bound(n)]
    bounds = [n for n in names if is_bound(n)]
    header = ["size"] + (["ours"] if len(ours) > 1 else [])
    header += [f"over {n}" for n in others] + [f"of {n}" for n in bounds] + ["spread"]
    rows = []
    for size in sorted(by_size, key=size_order):
        medians = {n: statistics.median(t) for n, t in by_size[size].items()}
        for name in ours:
            if name not in medians:
                continue
            row = [in_words(size)] + ([name] if len(ours) > 1 else [])
            row += [f"{medians[n] / medians[name]:.1f}x" if n in medians else "" for n in others]
            row += [f"{100 * medians[n] / medians[name]:.0f} %" if n in medians else "" for n in bounds]
            runs = by_size[size][name]
            row.append(f"{100 * (max(runs) - min(runs)) / medians[name]:.0f} %" if len(runs) > 1 else "")
            rows.append(row)
    return table(header, rows)


def among_themselves(by_size):
    """Implementations that are not rivals (policies): times relative to the first one."""
    names = in_order(name for runs in by_size.values() for name in runs)
    rows = []
    for size in sorted(by_size, key=size_order):
        medians = {n: statistics.median(t) for n, t in by_size[size].items()}
        base = next((medians[n] for n in names if n in medians), None)
        rows.append([in_words(size)] + [f"{medians[n] / base:.2f}" if n in medians else "" for n in names])
    return table(["size"] + [f"`{n}`" for n in names], rows) + f"\n\nTime relative to `{names[0]}`."


def over_part(by_size, part):
    """How much longer the whole takes than one part of it, where both were measured."""
    rows = []
    for size in sorted(by_size, key=size_order):
        for name, runs in by_size[size].items():
            if name in part.get(size, {}):
                ratio = statistics.median(runs) / statistics.median(part[size][name])
                rows.append([in_words(size), f"`{name}`", f"{ratio:.2f}"])
    return table(["size", "", "whole over part"], rows) if rows else ""


def over_one_thread(by_size, single):
    rows = []
    for size in sorted(by_size, key=size_order):
        for name, runs in by_size[size].items():
            if name in single.get(size, {}):
                ratio = statistics.median(single[size][name]) / statistics.median(runs)
                rows.append([in_words(size), f"`{name}`", f"{ratio:.2f}x"])
    return table(["size", "", "over one thread"], rows)


def machine_line(context):
    keys = ("cpu", "kvevict_simd", "eigen_simd", "compiler", "flags", "torch", "torch_matmul_gflops", "threads", "processors")
    return "; ".join(f"{k}: {context[k]}" for k in keys if context.get(k))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="JSON of Google Benchmark's shape")
    arguments = parser.parse_args()
    contexts, times = read(arguments.files)
    if not times:
        sys.exit("report.py: no benchmark named operation/implementation/size in " + ", ".join(arguments.files))
    out = [f"Machine: {machine_line(c)}." for c in contexts]
    for operation, by_size in times.items():
        if operation.endswith(WALL):
            continue
        out.append(f"### {operation}")
        single = times.get(operation.split(THREADS)[0] + WALL)
        if THREADS in operation and single:
            out.append(over_one_thread(by_size, single))
            continue
        names = {name for runs in by_size.values() for name in runs}
        rivals = any(n.startswith(OURS) for n in names) and len(names) > 1
        out.append(against_others(by_size) if rivals else among_themselves(by_size))
        for other, part in times.items():
            if other.startswith(operation + ".") and not rivals:
                ratios = over_part(by_size, part)
                if ratios:
                    out.append(f"Against `{other}` alone:\n\n{ratios}")
    print("\n\n".join(out))


if __name__ == "__main__":
    main()
