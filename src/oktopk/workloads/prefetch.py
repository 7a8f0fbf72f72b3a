"""Batches that are ready before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Batch = TypeVar("Batch")
Plan = TypeVar("Plan")


def prefetched(
    make: Callable[[Plan], Batch], plans: Iterable[Plan], depth: int = 4
) -> Generator[Batch, None, None]:
    """Batches, made by a thread that stays a few ahead of the reader."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        ahead: deque[Future[Batch]] = deque()
        for plan in plans:
            ahead.append(pool.submit(make, plan))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on all of the numbers, and on nothing else."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator().manual_seed(seed)
