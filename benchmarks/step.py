"""A step of Ok-Topk next to a dense allreduce, on loopback: processor time, calls and memory.

    python benchmarks/step.py                       # 2.26 million elements, 4 ranks
    python benchmarks/step.py --numel 2000000 --ranks 8

Steps of both kinds take turns, so both see the same machine. Processor time is that of a whole
process, with the threads of Gloo.
"""

from __future__ import annotations

import argparse
import cProfile
import resource
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import oktopk
from common import on_ranks, parser_for
from oktopk.common.flags import positive
from oktopk.lab.bench.raw import drift, heavy_tailed

_SKIPPED = 10
"""Steps before the first that counts."""


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--numel", type=positive, default=2_260_000, help="elements (%(default)s)")
    parser.add_argument("--ranks", type=positive, default=4, help="(%(default)s)")
    parser.add_argument("--density", type=float, default=0.02, help="(%(default)s)")
    parser.add_argument("--steps", type=positive, default=64, help="measured (%(default)s)")
    args = parser.parse_args()
    on_ranks(args.ranks, measure, args)


def measure(rank: int, args: argparse.Namespace) -> None:
    noise = [heavy_tailed(args.numel, seed=4 * rank + j) for j in range(2)]
    gradient = torch.empty(args.numel)
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(density=args.density), numel=args.numel)
    contenders: dict[str, Callable[[], object]] = {
        "dense": lambda: dist.all_reduce(gradient),
        "oktopk": lambda: reduce(gradient, out=gradient),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for step in range(_SKIPPED + args.steps):
        for name, run in contenders.items():
            drift(noise, step, out=gradient)
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    counts = count(lambda: drift(noise, 0, out=gradient), contenders["oktopk"])
    cpus = torch.tensor([sum(cpu for cpu, _ in times[name][_SKIPPED:]) for name in contenders])
    dist.all_reduce(cpus)
    if rank == 0:
        dense, own = (cpus / (dist.get_world_size() * args.steps) * 1e3).tolist()
        print(f"n = {args.numel:,}, P = {dist.get_world_size()}, density {args.density:g}")
        print(f"processor time of a rank: {own:.2f} ms, dense {dense:.2f} ms: {own / dense:.2f}x")
        own, dense = (
            statistics.median(wall for _, wall in times[name][_SKIPPED:]) * 1e3
            for name in ("oktopk", "dense")
        )
        print(f"time of a step: {own:.1f} ms, dense {dense:.1f} ms: {own / dense:.2f}x")
        print(counts)


def count(before: Callable[[], object], step: Callable[[], object]) -> str:
    """Python calls of a steady step, and the memory that it takes anew."""
    calls, faults = [], []
    for _ in range(8):
        before()
        faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faulted)
        before()
        profiler = cProfile.Profile()
        profiler.runcall(step)
        calls.append(sum(entry.callcount for entry in profiler.getstats()))
    kilobytes = statistics.median(faults) * resource.getpagesize() / 1000
    return f"calls of a step: {min(calls)}; memory taken anew from the system: {kilobytes:.0f} kB"


if __name__ == "__main__":
    main()
