"""What the benchmarks share."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """Values whose tails are far heavier than a normal distribution's, like a gradient's."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=random) * torch.randn(numel, generator=random).exp_()


def positive(text: str) -> int:
    """An argparse type: a whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def density(text: str) -> float:
    """An argparse type: a share above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def median_ms(job: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, after one that warms up."""
    job()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def join_group(folder: str, rank: int, size: int, threads: int) -> None:
    """Make this process one of `size` ranks that meet in a folder, on loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(threads)
    store = FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def slowest_ms(job: Callable[[], Any]) -> float:
    """The time of a call on the slowest rank; all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    job()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return 1000 * float(seconds)


def progress(rank: int, text: str) -> None:
    if rank == 0 and sys.stderr.isatty():
        print(f"\r{text:40}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns; numbers to the right, with as many digits as they need."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    lines = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    left = [isinstance(value, str) for value in rows[0].values()]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )
