"""Dense: the ordinary allreduce, as an algorithm like the others."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from .base import Algorithm, Reduced, State


@dataclass(frozen=True)
class Dense(Algorithm[State]):
    """Average every element.

    1. Accumulate. Where the residual is zero and the gradient needs no change, it is summed in
       place.
    2. Allreduce. Everything is applied, nothing is kept.

    16-bit gradients are summed in float32.
    """

    density: float = 1.0
    """Accepted so that algorithms can be exchanged by name; all elements are sent anyway."""

    def init(self) -> State:
        return State()

    def target(self, numel: int, step: int | None = None) -> int:
        return numel

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        sums = acc.merge()
        with comm.time("reduce"):
            comm.transport.all_reduce(sums)
        return Reduced(sums, residual=None, offered=acc.numel), state

    def words(self, numel: int, size: int) -> float:
        """2n(P-1)/P"""
        return 2 * numel * (size - 1) / size
