"""Times of an allreduce of one gradient, on all GPUs of a machine: dense, in bfloat16, and Ok-Topk.

    torchrun --nproc-per-node 2 benchmarks/gpu.py
    torchrun --nproc-per-node 2 benchmarks/gpu.py --device cpu --numel 100000

A row is one size of gradient. Times are medians over steps, of the slowest rank. `host` is the time
after which the call returns: the device may still work then.

Dense steps use the gradient as their memory. Ok-Topk reads the gradient, and writes averages to
memory of their own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from common import parser_for, progress, table
from oktopk.common.flags import positive
from oktopk.wire.message import FORMATS

Call = Callable[[Tensor], Any]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--numel",
        type=positive,
        nargs="+",
        default=[1_000_000, 10_000_000, 27_569_568, 100_000_000],
        metavar="N",
        help="elements of the gradient, one row each",
    )
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--wire", choices=list(FORMATS), default="int8")
    parser.add_argument("--steps", type=positive, default=50, help="timed ones (50)")
    parser.add_argument("--warmup", type=positive, default=20, help="steps before them (20)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, which tells each process its rank")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu works everywhere")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        rows = [measure(numel, device, args) for numel in args.numel]
        progress(dist.get_rank(), "")
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks on {_name(device)}, torch {torch.__version__}")
            print(f"density {args.density}, wire {args.wire}; times in ms, sizes in MB a rank")
            print(table(rows))
    finally:
        dist.destroy_process_group()


def measure(numel: int, device: torch.device, args: Any) -> dict[str, Any]:
    """A row of the table."""
    size = dist.get_world_size()
    algorithm = oktopk.OkTopk(density=args.density, wire=args.wire)
    reduction = oktopk.SparseAllreduce(algorithm, numel, device=device)
    average = torch.empty(numel, device=device)
    ways: dict[str, Call] = {
        "dense": dist.all_reduce,
        "bfloat16": in_bfloat16,
        "ok-topk": lambda gradient: reduction(gradient, out=average),
    }
    row: dict[str, Any] = {"n": f"{numel:,}"}
    for name, call in ways.items():
        progress(dist.get_rank(), f"{numel:,} elements: {name}")
        whole, host = times(call, numel, device, args)
        row |= {name: whole, f"{name} host": host}
    assert reduction.last is not None
    row["dense/ok-topk"] = row["dense"] / row["ok-topk"]
    row["dense MB"] = 2 * 4 * numel * (size - 1) / size / 1e6
    row["ok-topk MB"] = reduction.last.bytes_sent / 1e6
    return row


def in_bfloat16(gradient: Tensor) -> None:
    """What DDP's hook bf16_compress_hook does."""
    half = gradient.to(torch.bfloat16)
    dist.all_reduce(half)
    gradient.copy_(half)


def times(call: Call, numel: int, device: torch.device, args: Any) -> tuple[float, float]:
    """Medians, in milliseconds, of a step and of its call alone."""
    random = torch.Generator(device).manual_seed(dist.get_rank())
    normal = [torch.randn(numel, device=device, generator=random) for _ in range(2)]
    sources, gradient = [values**3 for values in normal], torch.empty(numel, device=device)
    del normal
    whole, host = [], []
    for step in range(args.warmup + args.steps):
        gradient.copy_(sources[step % len(sources)])
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        call(gradient)
        returned = time.perf_counter()
        _finish(device)
        ended = time.perf_counter()
        if step >= args.warmup:
            whole.append(ended - start)
            host.append(returned - start)
    medians = torch.tensor([statistics.median(whole), statistics.median(host)], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    slowest, call_alone = (1000 * medians).tolist()
    return slowest, call_alone


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


if __name__ == "__main__":
    main()
