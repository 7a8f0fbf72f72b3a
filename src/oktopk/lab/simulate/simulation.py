"""A simulation: P ranks run an algorithm for some steps, and every message is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algorithms import Algorithm
from ...common.errors import UserError
from ...core.reduction import Reduction, prepare
from ...core.stats import StepStats
from ...cost.schedule import Schedule
from .gradients import Source
from .recorder import Recorder
from .transport import InProcess
from .world import World

Watch = Callable[[int, int, Reduction, Tensor], None]
"""(rank, step, reduction, average): called after each step of each rank."""


@dataclass(frozen=True)
class Simulated:
    """What P ranks have done."""

    stats: list[list[StepStats]]
    """For each step, what each rank reports."""
    schedule: Schedule
    """The messages of the last steps."""
    recorded: int
    """How many steps those are."""


def simulate(
    algorithm: Algorithm,
    source: Source,
    size: int,
    steps: int,
    record: int = 1,
    watch: Watch | None = None,
) -> Simulated:
    """Run the real code of all ranks, as `SparseAllreduce` does.

    Args:
        algorithm: what to reduce with.
        source: of gradients.
        size: P.
        steps: how many to take.
        record: so many steps at the end are in the schedule.
        watch: is called after each step of each rank.
    """
    numel, record = source.numel, min(record, steps)
    recorder = Recorder(size)
    world = World(size, recorder)

    def live(rank: int) -> list[StepStats]:
        reduction = Reduction(algorithm, numel, InProcess(world, rank), torch.float32)
        gradient = torch.empty(numel)
        stats = []
        for step in range(steps):
            source.write(rank, size, step, gradient)
            recorder.on[rank] = step >= steps - record
            stats.append(_step(reduction, gradient))
            if watch is not None:
                watch(rank, step, reduction, gradient)
        return stats

    with _one_thread():
        prepare(algorithm, numel, torch.float32, torch.device("cpu"))
        by_rank = world.run(live)
    return Simulated(
        [list(each) for each in zip(*by_rank, strict=True)], recorder.schedule(), record
    )


def _step(reduction: Reduction, gradient: Tensor) -> StepStats:
    """One step; the average takes the place of the gradient."""
    attempt = reduction.attempt([gradient], [gradient])
    if not attempt.finite:
        raise UserError("a sum over ranks is not finite: use smaller gradients")
    reduction.commit(attempt)
    assert reduction.last is not None
    return reduction.last


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each rank computes with one thread: there are threads enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
