"""TopkA: an allgather of every rank's k largest entries."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import NO_THRESHOLD, Carried, is_due, keep_largest
from .base import Algorithm, Reduced, State
from .exchange import gather_sum
from .offer import offer


@dataclass(frozen=True)
class TopkState(State):
    """A threshold, carried from step to step."""

    steps: int = 0
    """Sparse steps so far."""
    local: Carried = NO_THRESHOLD
    """Threshold of this rank's own values."""


@dataclass(frozen=True)
class TopkA(Algorithm[TopkState]):
    """Every rank sends k entries to every other.

    1. Offer: accumulate, and select the k largest entries of this rank.
    2. Allgather the offers.
    3. Sum them on every rank. The result has between k and kP entries.
    4. If `global_topk`: keep the k largest of the sums.
    5. Clear the applied entries from the residual.
    """

    threshold_interval: int = 1
    """Steps between exact local thresholds; 1 selects exactly k in each step."""
    global_topk: bool = False
    """Whether only the k largest sums are applied."""

    def init(self) -> TopkState:
        return TopkState()

    def reduce(self, state: TopkState, acc: Accumulator, comm: Comm) -> tuple[Reduced, TopkState]:
        offered = offer(acc, comm, state.local, is_due(state.steps, self.threshold_interval))
        sent, applied = gather_sum(comm, offered.entries)
        threshold = 0.0
        if self.global_topk:
            with comm.time("select"):
                applied, threshold = keep_largest(applied, acc.k)
        acc.clear(sent, applied)
        count = len(offered.entries)
        reduced = Reduced(applied, acc.values, count, offered.threshold, threshold)
        return reduced, TopkState(state.steps + 1, offered.carried)

    def words(self, numel: int, size: int) -> float:
        """2k(P-1)"""
        return 2 * self.target(numel) * (size - 1)
