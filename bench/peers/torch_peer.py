#!/usr/bin/env python3
"""PyTorch's side of the comparison: SnapKV window scores by kvpress's formula, and torch.topk, with the shapes and the
thread count of kvevict_bench. Prints JSON of Google Benchmark's shape, so that report.py merges it.

    bench/peers/torch_peer.py [--threads 1] [--repetitions 5] [--filter REGEX] >torch.json

Without torch it says so on stderr and prints a report without rows. --check compares the scores with a float64
computation first (it always runs) and stops there.
"""
import argparse
import json
import os
import platform
import re
import sys
import time

torch = F = None  # imported by main(), once the number of threads is known
WINDOW, GROUP, HEAD_DIM, POOL = 32, 4, 128, 5


def window_scores(queries, keys):
    """kvpress's SnapKV for one KV head. queries: [group, window, dim], keys: [tokens, dim]; returns [tokens - window].

    Softmax over the full causal row in float32, mean over the window's rows, average pooling per query head, then the
    mean over the group.
    """
    tokens, window = keys.shape[0], queries.shape[1]
    logits = torch.matmul(queries, keys.transpose(0, 1)) / HEAD_DIM**0.5
    mask = torch.full((window, window), float("-inf")).triu(1)
    logits[:, :, -window:] += mask
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(queries.dtype)
    scores = weights[:, :, : tokens - window].mean(dim=1)
    scores = F.avg_pool1d(scores.unsqueeze(0), kernel_size=POOL, padding=POOL // 2, stride=1).squeeze(0)
    return scores.mean(dim=0)


def check():
    torch.manual_seed(0)
    queries, keys = torch.randn(GROUP, WINDOW, HEAD_DIM), torch.randn(300, HEAD_DIM)
    got = window_scores(queries, keys)
    want = torch.zeros(300 - WINDOW, dtype=torch.float64)
    for g in range(GROUP):
        rows = torch.zeros(300, dtype=torch.float64)
        for i in range(WINDOW):
            visible = 300 - WINDOW + i + 1
            row = keys[:visible].double() @ queries[g, i].double() / HEAD_DIM**0.5
            rows[:visible] += torch.softmax(row, 0) / WINDOW
        padded = F.pad(rows[: 300 - WINDOW], (POOL // 2, POOL // 2))
        want += padded.unfold(0, POOL, 1).sum(1) / POOL / GROUP
    worst = ((got.double() - want).abs().max() / want.max()).item()
    if worst > 1e-5:
        sys.exit(f"torch_peer.py: scores differ from the float64 computation by {worst:.2g} of the largest")


def cases():
    """(name, function that is timed) for each point."""
    for tokens in (4096, 32768, 131072):
        torch.manual_seed(tokens)
        queries, keys = torch.randn(GROUP, WINDOW, HEAD_DIM), torch.randn(tokens, HEAD_DIM)
        yield f"score_window/torch/{tokens}", lambda q=queries, k=keys: window_scores(q, k)
    for n in (1024, 4096, 16384, 32768, 65536, 262144):
        torch.manual_seed(n)
        arrays = [torch.exp(2 * torch.randn(n)) for _ in range(min(64, max(4, (1 << 20) // n)))]
        state = {"next": 0}

        def select(arrays=arrays, state=state, k=n * 15 // 100):
            state["next"] = (state["next"] + 1) % len(arrays)
            return arrays[state["next"]].topk(k, dim=-1).indices

        yield f"topk/torch/{n}", select


def measure(function, seconds=0.2):
    """Nanoseconds per call: wall time and processor time."""
    function()
    calls, elapsed = 1, 0.0
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            function()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if wall >= seconds:
            return calls, wall / calls * 1e9, cpu / calls * 1e9
        elapsed = max(wall, 1e-7)
        calls = max(calls + 1, min(calls * 10, int(calls * seconds * 1.2 / elapsed)))


def matmul_gflops():
    """The speed of torch's matrix product at the shape of the scores: what its BLAS makes of this machine."""
    a, b = torch.randn(GROUP * WINDOW, HEAD_DIM), torch.randn(HEAD_DIM, 8192)
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] / measure(lambda: torch.matmul(a, b))[2]


def cpu_model():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--filter", default=".", help="regular expression on the names")
    parser.add_argument("--check", action="store_true", help="stop after the check")
    arguments = parser.parse_args()
    for library in ("OMP", "OPENBLAS", "MKL"):  # torch.set_num_threads does not reach every BLAS
        os.environ[f"{library}_NUM_THREADS"] = str(arguments.threads)
    global torch, F
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        torch = None
    report = {"context": {"cpu": cpu_model(), "threads": str(arguments.threads)}, "benchmarks": []}
    if torch is None:
        print("torch_peer.py: torch is not installed; no rows", file=sys.stderr)
    else:
        torch.set_num_threads(arguments.threads)
        report["context"]["torch"] = torch.__version__
        check()
        if arguments.check:
            return
        with torch.inference_mode():
            report["context"]["torch_matmul_gflops"] = f"{matmul_gflops():.0f}"
            chosen = [c for c in cases() if re.search(arguments.filter, c[0])]
            for repetition in range(arguments.repetitions):  # interleaved, so that drift meets all cases alike
                for name, function in chosen:
                    calls, wall, cpu = measure(function)
                    # One thread is compared by processor time, as kvevict_bench's rows are.
                    report["benchmarks"].append({
                        "name": name, "run_name": name, "run_type": "iteration", "repetition_index": repetition,
                        "threads": arguments.threads, "iterations": calls, "real_time": wall, "cpu_time": cpu,
                        "time_unit": "ns"})
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
