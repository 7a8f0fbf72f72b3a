"""Small collective functions: gathering values, and sharing failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .errors import UserError, mistake

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The values of all workers."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attempt(work: Callable[[], T]) -> T:
    """Call `work` on all workers. If it fails on one of them, all raise the error."""
    result, told, failure, error = None, "", "", None
    try:
        result = work()
    except Exception as caught:
        told = mistake(caught)
        if not told:
            failure, error = f"{type(caught).__name__}: {caught}", caught
    answers = gather((told, failure))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(answers):
        if failure:
            raise RuntimeError(f"worker {rank} failed: {failure}")
    for told, _ in answers:
        if told:
            raise UserError(told)
    assert result is not None
    return result


def first_on_one(local_rank: int, work: Callable[[], T]) -> T:
    """`work` on one worker of each machine, and then on the others, who find it done."""
    if local_rank:
        attempt(lambda: True)
        return attempt(work)
    result = attempt(work)
    attempt(lambda: True)
    return result


def mean(values: list[float], device: torch.device) -> list[float]:
    """The means over workers."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means
