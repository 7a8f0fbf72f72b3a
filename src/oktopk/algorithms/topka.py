"""TopkA: an allgather of every rank's k largest entries."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.select import is_due, keep_largest
from ..wire.message import Entries
from .base import Algorithm, Step
from .exchange import gather_sum


@dataclass(frozen=True)
class TopkA(Algorithm):
    """Everyone sends k entries to everyone.

    1. Accumulate, and select the k largest entries of this rank.
    2. Allgather them.
    3. Sum them on every rank. The result has between k and kP entries.
    4. If `global_topk`: keep the k largest of the sums.
    5. Clear what was offered and applied from the residual.
    """

    threshold_interval: int = 1
    """Steps between exact local thresholds; 1 selects exactly k in each step."""
    global_topk: bool = False
    """Whether only the k largest sums are applied."""

    def reduce(self, step: Step) -> Entries:
        local = step.offer(exact=is_due(step.state.sparse_steps, self.threshold_interval))
        sent, applied = gather_sum(step, local)
        if self.global_topk:
            with step.time("select"):
                applied, step.global_threshold = keep_largest(applied, step.target)
        step.clear(sent, applied)
        return applied

    def words(self, numel: int, size: int) -> float:
        """2k(P-1)"""
        return 2 * self.target(numel) * (size - 1)
