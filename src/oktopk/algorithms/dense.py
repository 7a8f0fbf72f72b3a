"""Dense: the ordinary allreduce, as an algorithm like the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.select import select
from .base import Algorithm, Step


@dataclass(frozen=True)
class Dense(Algorithm):
    """Average every element.

    1. Accumulate: acc = residual + gradient. Where a residual is zero and the gradient needs no
       change, it is summed in place.
    2. Allreduce acc. Everything is applied, nothing is kept.

    16-bit gradients are summed in float32.
    """

    density: float = 1.0
    """Accepted so that algorithms can be exchanged by name; all elements are sent anyway."""

    def target(self, numel: int, step: int | None = None) -> int:
        return numel

    def reduce(self, step: Step) -> Tensor:
        sums = step.merge()
        with step.time("reduce"):
            step.transport.all_reduce(sums)
            # A NaN or Inf of any rank is one in the sum, the same on all; and what is not finite
            # makes the sum of all elements so, which is faster to see than to find.
            if not math.isfinite(float(sums.sum())):
                step.finite = len(select(sums, math.inf)) == 0
        return sums

    def words(self, numel: int, size: int) -> float:
        """2n(P-1)/P"""
        return 2 * numel * (size - 1) / size
