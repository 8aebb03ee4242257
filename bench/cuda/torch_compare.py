#!/usr/bin/env python3
"""Times the usual torch formulations of what device_bench timed, and adds them to its JSON: torch_compare.py FILE."""
import json
import sys

import torch


def median_us(body, runs=20):
    for _ in range(3):
        body()
    times = []
    for _ in range(runs):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def main():
    path = sys.argv[1]
    heads, group, tokens, dim, window, layers = 8, 4, 32 * 1024, 128, 32, 32
    k = tokens * 15 // 100
    results = []

    scores = torch.randn(32 * heads, tokens, device="cuda").mul(2).exp()
    results.append(("torch.topk 256 x 32 Ki", median_us(lambda: torch.topk(scores, k, dim=-1))))
    results.append(("torch.topk, indices sorted", median_us(lambda: torch.topk(scores, k, dim=-1)[1].sort(-1))))

    keys = torch.randn(heads, tokens, dim, device="cuda", dtype=torch.float16)
    queries = torch.randn(heads, group * window, dim, device="cuda", dtype=torch.float16)
    hidden = torch.arange(tokens, device="cuda") > torch.arange(tokens - window, tokens, device="cuda").repeat(group)[:, None]

    def snapkv():
        logits = torch.matmul(queries, keys.transpose(1, 2)).float() * dim**-0.5
        mass = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)[..., : tokens - window]
        pooled = torch.nn.functional.max_pool1d(mass.mean(1, keepdim=True), 7, padding=3, stride=1)
        return pooled.squeeze(1)

    results.append((f"torch window scores, {layers} layers", layers * median_us(snapkv)))
    rows = torch.randint(0, tokens, (heads, k), device="cuda").sort(-1)[0][..., None].expand(-1, -1, dim)
    results.append((f"torch gather of keys and values, {layers} layers", 2 * layers * median_us(lambda: keys.gather(1, rows))))

    for name, micros in results:
        print(f"{name:<46} {micros:9.1f} us")
    with open(path) as file:
        data = json.load(file)
    data["torch"] = {"version": torch.__version__, "rows": [{"name": n, "us": round(u, 2)} for n, u in results]}
    with open(path, "w") as file:
        json.dump(data, file, indent=1)


if __name__ == "__main__":
    main()
