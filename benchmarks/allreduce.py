"""One step of every algorithm on P local ranks over loopback, against a dense Gloo allreduce.

Starts the ranks itself. Every step is followed by a plain allreduce of the same tensor, so that
the ratio to dense means something on a noisy machine. Gradients drift: scale and location of the
large values change from step to step, so thresholds are never right for long.

columns
  ms           median time of a step, the slowest rank
  / dense      ms over the ms of the torch.distributed.all_reduce calls between its steps
  bytes        bytes that a rank sends in a step, mean over ranks and steps (float32, so that a
               word is 4 bytes)
  an entry     the same for each entry, everything included, where a rank sends its offer to owners
               and the applied entries of its region to all others: oktopk, oktopk-variable
  x bound      the same in words over 2k(P-1)/P, the least that any algorithm must send
  count/k      applied entries over k, mean over steps
  off          mean of |applied entries / k - 1|
  the rest     median ms of each stage
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import oktopk
from common import on_ranks, parser_for, progress, slowest_ms, table
from oktopk.common.flags import positive, share
from oktopk.common.host import cores
from oktopk.core.stats import STAGES
from oktopk.lab.bench.raw import drift, heavy_tailed


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--numel", type=positive, default=27_569_568, help="elements (27,569,568)")
    parser.add_argument("--density", type=share, default=0.02, help="share that is sent (0.02)")
    parser.add_argument("--ranks", type=positive, default=4, help="number of local ranks, P (4)")
    parser.add_argument("--steps", type=positive, default=16, help="steps that are measured (16)")
    parser.add_argument("--skip", type=positive, default=10, help="steps before, unmeasured (10)")
    parser.add_argument("--threads", type=positive, default=1, help="threads of each rank (1)")
    parser.add_argument("--wire", default="int8", metavar="NAME", help="wire format (int8)")
    parser.add_argument(
        "--algorithms", nargs="+", default=oktopk.names(), metavar="NAME", help="(all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    args.algorithms = list(dict.fromkeys(args.algorithms))
    try:
        for name in args.algorithms:
            made(name, args)
    except ValueError as error:
        parser.error(str(error))
    rows = on_ranks(args.ranks, measure, args, threads=args.threads)
    if args.json:
        print(json.dumps({"arguments": vars(args), "rows": rows}))
        return
    k = max(1, round(args.density * args.numel))
    print(
        f"n = {args.numel:,}, k = {k:,}, P = {args.ranks}, {args.steps} steps after {args.skip}, "
        f"{args.threads} thread(s) a rank, {len(cores())} cores, float32"
    )
    print(table(rows))


def made(name: str, args: argparse.Namespace) -> oktopk.Algorithm:
    wire = {} if name == "dense" else {"wire": args.wire}
    return oktopk.algorithm(name, density=args.density, **wire)


def measure(rank: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    noise = [heavy_tailed(args.numel, seed=4 * rank + j) for j in range(2)]
    gradient = torch.empty(args.numel)
    records: dict[str, list[oktopk.StepStats]] = {}
    times: dict[str, list[float]] = {}
    raw: dict[str, list[float]] = {}
    for name in args.algorithms:
        reduce = oktopk.SparseAllreduce(made(name, args), numel=args.numel)
        records[name], times[name], raw[name] = [], [], []
        for step in range(args.skip + args.steps):
            progress(rank, f"{name}: step {step + 1} of {args.skip + args.steps}")
            drift(noise, step, out=gradient)
            sparse_ms = slowest_ms(partial(reduce, gradient, out=gradient))
            drift(noise, step, out=gradient)
            raw_ms = slowest_ms(partial(dist.all_reduce, gradient))
            if step >= args.skip:
                assert reduce.last is not None
                records[name].append(reduce.last)
                times[name].append(sparse_ms)
                raw[name].append(raw_ms)
    rows = [baseline([ms for each in raw.values() for ms in each], args)]
    rows += [summary(name, times[name], raw[name], records[name], args) for name in args.algorithms]
    return rows


def baseline(raw: list[float], args: argparse.Namespace) -> dict[str, Any]:
    """The row of the plain allreduce: 2n(P-1)/P words."""
    k = max(1, round(args.density * args.numel))
    return {
        "algorithm": "gloo all_reduce",
        "ms": statistics.median(raw),
        "/ dense": 1.0,
        "bytes": round(2 * 4 * args.numel * (args.ranks - 1) / args.ranks),
        "an entry": 0.0,
        "x bound": args.numel / k if args.ranks > 1 else 0.0,
        "count/k": args.numel / k,
        "off": args.numel / k - 1,
    } | dict.fromkeys(STAGES, 0.0)


def summary(
    name: str,
    times: list[float],
    raw: list[float],
    records: list[oktopk.StepStats],
    args: argparse.Namespace,
) -> dict[str, Any]:
    k = max(1, round(args.density * args.numel))
    ms = statistics.median(times)
    sent = torch.tensor([statistics.fmean(r.bytes_sent for r in records)], dtype=torch.float64)
    dist.all_reduce(sent)
    mean_sent = float(sent) / args.ranks
    least = 4 * 2 * k * (args.ranks - 1) / args.ranks
    counts = [record.selected_global / k for record in records]
    others = (args.ranks - 1) / args.ranks
    entries = statistics.fmean(r.selected_local + r.selected_global for r in records) * others
    by_owners = name.startswith("oktopk") and args.ranks > 1
    return {
        "algorithm": name,
        "ms": ms,
        "/ dense": ms / statistics.median(raw),
        "bytes": round(mean_sent),
        "an entry": mean_sent / entries if by_owners else 0.0,
        "x bound": mean_sent / least if least else 0.0,
        "count/k": statistics.fmean(counts),
        "off": statistics.fmean(abs(count - 1) for count in counts),
    } | {
        stage: 1000 * statistics.median(record.seconds[stage] for record in records)
        for stage in STAGES
    }


if __name__ == "__main__":
    main()
