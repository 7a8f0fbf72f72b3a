"""Checks before training. All workers call them together."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..common import host
from ..common.errors import UserError
from ..common.format import byte_size, count, plural
from ..common.together import attempt, gather
from .base import Context

Model = TypeVar("Model", bound=nn.Module)


def check_agreement(facts: object) -> None:
    """Workers that read different data would take different numbers of steps.

    Args:
        facts: must be the same on all workers; its `repr` is compared.
    """
    if len(set(gather(zlib.crc32(repr(facts).encode())))) > 1:
        raise UserError("workers have different data: all machines need the same files")


def check_step(context: Context, samples: int, noun: str) -> None:
    """There is enough for one step."""
    size = dist.get_world_size()
    needed = context.batch_size * size * context.nsteps_update
    if samples < needed:
        raise UserError(
            f"the training set has {plural(samples, noun)}, but a step takes {needed} "
            f"(--batch-size {context.batch_size}, {plural(size, 'worker')}, --nsteps-update "
            f"{context.nsteps_update}): make one of these smaller, or the training set larger"
        )


def make_model(make: Callable[[], Model], context: Context, sizes: dict[str, int]) -> Model:
    """The model, unless it cannot be trained here: then the system would end a worker.

    Args:
        sizes: flags that make the model smaller, and their values.
    """
    attempt(lambda: _check_memory(make, context, sizes))
    return attempt(make)


def elements(make: Callable[[], nn.Module]) -> int:
    """Parameters of a model, which is made without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def _check_memory(make: Callable[[], Model], context: Context, sizes: dict[str, int]) -> bool:
    parameters = elements(make)
    needed = 4 * parameters * context.copies
    workers, left = _memory(context.device)
    if left is not None and workers * needed > left:
        given = " and ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise UserError(
            f"{given} make {count(parameters)} parameters: to train them takes at least "
            f"{byte_size(needed)} for each worker, and {plural(workers, 'worker')} have "
            f"{byte_size(left)}: make {' or '.join(sizes)} smaller"
        )
    return True


def _memory(device: torch.device) -> tuple[int, int | None]:
    """How many workers share the memory that this one uses, and how much is left of it."""
    machines = gather(host.machine())
    if device.type == "cuda":
        return 1, torch.cuda.mem_get_info(device)[0]
    return machines.count(host.machine()), host.left()
