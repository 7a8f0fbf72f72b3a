"""Auto: dense averages or Ok-Topk, whichever is faster here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from .base import Algorithm, Reduced, State
from .dense import Dense
from .oktopk import OkTopk

ANY = "auto"
"""The name of a wire format that is yet to be chosen."""
DENSE_STEPS, SPARSE_STEPS = 6, 8
"""Steps of a round, at least."""


@dataclass(frozen=True)
class Auto(Algorithm[State]):
    """Measure dense steps and steps of Ok-Topk, and go on with what is faster here.

    1. Average densely: in the warm-up, and in at least six steps.
    2. Take eight steps of Ok-Topk.
    3. All ranks put their times together, and so decide alike. Where the times are too close or too
       short to tell, repeat 1 and 2.

    The decision is for the whole model. It is logged with its reason, and saved in the state. Here
    is only the configuration: core/chooser.py measures and decides.
    """

    fixed_size = True
    other_wires: ClassVar[tuple[str, ...]] = (ANY,)
    rounds: int = 4
    """How often to measure both, at most."""
    wire: str = field(default=ANY, kw_only=True)
    """`auto`: int8 or bfloat16, which is more exact; or one that `OkTopk` knows, to be used."""

    @property
    def measuring(self) -> int:
        """Most steps until the decision, without a warm-up."""
        return self.rounds * (DENSE_STEPS + SPARSE_STEPS)

    def first(self) -> Algorithm:
        return Dense()

    def sparse(self, wire: str) -> OkTopk:
        """What is measured, and perhaps chosen."""
        return OkTopk(self.density, wire=wire)

    def ramped(self, wire: str, start: int) -> OkTopk:
        """The same, with the ramp from step `start` on."""
        if not self.ramp:
            return self.sparse(wire)
        return OkTopk(self.density, start, ramp=self.ramp, ramp_steps=self.ramp_steps, wire=wire)

    def init(self) -> State:
        return State()

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        """A dense average, where nobody measures."""
        return Dense().reduce(state, acc, comm)

    def words(self, numel: int, size: int) -> float:
        """The larger of both, as either may be chosen."""
        return max(each.words(numel, size) for each in (Dense(), OkTopk(self.density)))
