"""Gaussiank: a threshold from a fitted normal distribution instead of an exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import keep_largest, select
from ..wire.message import Entries
from .base import Algorithm, Reduced, State
from .exchange import gather_sum

_CORRECTIONS = 4


@dataclass(frozen=True)
class Gaussiank(Algorithm[State]):
    """Guess the threshold from the size of the values, then go on as TopkA does.

    1. Accumulate, and fit a normal distribution with mean 0: sigma is the root mean square.
    2. Select |acc| >= sigma_scale * sigma.
    3. Up to four times: if that gave fewer than 2k/3 entries halve the threshold, if more than
       4k/3 raise it by half (between two that were tried, take their geometric mean), and select
       again. Of too many in the end, the k largest are kept. Too few are accepted, unless another
       threshold had given too many.
    4. Allgather and sum as TopkA does.
    5. Clear the applied entries from the residual.
    """

    sigma_scale: float | None = None
    """First threshold in units of sigma; None takes the one that fits the density."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_scale is not None and not 0 < self.sigma_scale < math.inf:
            raise ValueError(
                f"sigma_scale is {self.sigma_scale!r}, but must be above 0: 2.5 selects what "
                "exceeds 2.5 standard deviations, None derives it from the density"
            )

    def init(self) -> State:
        return State()

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        acc.accumulate(math.inf)
        with comm.time("select"):
            offered, threshold = self._select(acc.values, acc.k)
        sent, applied = gather_sum(comm, offered)
        acc.clear(sent, applied)
        return Reduced(applied, acc.values, len(offered), threshold), state

    def _select(self, acc: Tensor, k: int) -> tuple[Entries, float]:
        """Steps 1 to 3."""
        scale = self.sigma_scale
        if scale is None:
            scale = NormalDist().inv_cdf(1 - k / acc.numel() / 2)
        norm = float(torch.linalg.vector_norm(acc))
        if math.isinf(norm):  # squares of large values overflow
            largest = float(torch.linalg.vector_norm(acc, math.inf))
            norm = largest * float(torch.linalg.vector_norm(acc / largest))
        threshold = scale * norm / math.sqrt(acc.numel()) if k < acc.numel() else 0.0
        low, high = 0.0, math.inf
        entries = select(acc, threshold)
        for _ in range(_CORRECTIONS):
            if len(entries) < k * 2 / 3 and threshold > 0:
                high = threshold
                threshold = math.sqrt(low) * math.sqrt(high) if low else threshold * 0.5
            elif len(entries) > k * 4 / 3:
                low = threshold
                finite = high < math.inf
                threshold = math.sqrt(low) * math.sqrt(high) if finite else threshold * 1.5
            else:
                break
            entries = select(acc, threshold)
        if len(entries) < k * 2 / 3 and low:
            entries = select(acc, low)
        if len(entries) > k * 4 / 3:
            entries, threshold = keep_largest(entries, k)
        return entries, threshold

    def words(self, numel: int, size: int) -> float:
        """2k(P-1), with up to a third more entries than asked for"""
        return 2 * (4 / 3 * self.target(numel)) * (size - 1)
