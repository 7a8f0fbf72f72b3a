"""Staleness: how many steps elements wait until they are applied, from a sample of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .buckets import Bucket
from .detail import Histogram, Staleness

_MOST = 1 << 16
"""Longer waits count as so long."""
_UNKNOWN = -(1 << 40)
"""The beginning of a wait that began before anybody looked."""


class Waits:
    """The waits of some elements of a bucket, counted without waiting for the device.

    An element waits from the first gradient that this rank keeps in its residual until the element
    is applied, whichever rank offered it.

    Args:
        sample: how many elements to follow.
    """

    def __init__(self, bucket: Bucket, sample: int) -> None:
        self._bucket, numel = bucket, bucket.reduction.numel
        places = _spread(numel, sample)
        self.weight = numel / len(places)
        """Elements for each one of the sample."""
        self._pieces = _by_part(places, [slot.numel for slot in bucket.slots])
        device = bucket.reduction.device
        self._pieces = [(part, here.to(device)) for part, here in self._pieces]
        self._places = places.to(device)
        self._counts = torch.zeros(_MOST + 1, dtype=torch.int64, device=device)
        """Waits of applied elements, by their length."""
        self._told = self._counts.clone()
        """The same when they were last taken."""
        self.begin()

    def begin(self) -> None:
        """Begin to look, or begin again with another residual. Counts stay."""
        reduction = self._bucket.reduction
        waiting = reduction.residual[self._places] != 0
        self._since = torch.where(waiting, _UNKNOWN, reduction.steps - 1)
        """The last step after which an element did not wait."""
        self._before = self._since
        self._last = self._nothing = (self._places[:0], self._places[:0])

    def after(self, step: int) -> None:
        """A step was committed. Averages and residual are where it left them."""
        attempt, since = self._bucket.attempt, self._since
        assert attempt is not None
        self._before = since
        if not attempt.sparse:  # everything was applied
            self._since, self._last = torch.full_like(since, step), self._nothing
            return
        out = attempt.acc.out
        applied = torch.cat([out[part][here] for part, here in self._pieces]) != 0
        empty = self._bucket.reduction.residual[self._places] == 0
        waits = (step - 1 - since).clamp(max=_MOST)
        self._count(waits, (applied & (since > _UNKNOWN)).long())
        self._since = torch.where(applied | empty, step, since)

    def rewind(self) -> None:
        """The last step was taken back, or taken again. Twice changes nothing."""
        self._since, self._before = self._before, self._since
        waits, counted = self._last
        self._count(waits, -counted)

    def _count(self, waits: Tensor, counted: Tensor) -> None:
        self._counts.index_add_(0, waits, counted)
        self._last = waits, counted

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """How many elements waited how long: those applied since this was last called, and those
        that wait after a step."""
        applied = (self._counts - self._told).clamp(min=0)
        self._told.copy_(self._counts)
        return self._weighed(applied), self._waiting(step)

    def total(self, step: int) -> tuple[Tensor, Tensor]:
        """The same for all that were applied until now."""
        return self._weighed(self._counts), self._waiting(step)

    def _waiting(self, step: int) -> Tensor:
        ages = step - self._since[(self._since < step) & (self._since > _UNKNOWN)]
        return self._weighed(ages.clamp(max=_MOST).bincount(minlength=_MOST + 1))

    def _weighed(self, counts: Tensor) -> Tensor:
        return counts.cpu().double() * self.weight


def together(parts: Sequence[tuple[Tensor, Tensor]]) -> Staleness:
    """The staleness of several buckets, from their `Waits`."""
    applied = torch.stack([each[0] for each in parts]).sum(0)
    waiting = torch.stack([each[1] for each in parts]).sum(0)
    longest = int(applied.nonzero().max()) if applied.any() else 0
    edges = [0, *(1 << power for power in range(longest.bit_length() + 1))]
    cumulative = [0.0, *applied.cumsum(0).tolist()]
    counts = [
        round(cumulative[min(high, _MOST + 1)] - cumulative[low]) for low, high in pairwise(edges)
    ]
    return Staleness(
        mean=_mean(applied),
        p99=_quantile(applied, 0.99),
        max=longest,
        waiting_mean=_mean(waiting),
        waiting_p99=_quantile(waiting, 0.99),
        histogram=Histogram(tuple(edges), tuple(counts)),
    )


def _mean(weights: Tensor) -> float:
    total = float(weights.sum())
    return float((weights * torch.arange(weights.numel())).sum()) / total if total else 0.0


def _quantile(weights: Tensor, share: float) -> int:
    """The smallest number that at least this share does not exceed; 0 of nothing."""
    below = weights.cumsum(0)
    wanted = share * float(below[-1])
    return int(torch.searchsorted(below, wanted)) if wanted else 0


def _spread(numel: int, count: int) -> Tensor:
    """Sorted elements, one at random in each of `count` equal ranges; always the same ones."""
    ends = torch.arange(min(numel, count) + 1) * numel // min(numel, count)
    generator = torch.Generator().manual_seed(numel)
    shares = torch.rand(len(ends) - 1, generator=generator, dtype=torch.float64)
    return ends[:-1] + (shares * ends.diff()).long()


def _by_part(places: Tensor, sizes: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Which elements of each part are among sorted elements of the whole."""
    starts = [0, *accumulate(sizes)]
    cuts = torch.searchsorted(places, torch.tensor(starts)).tolist()
    return [
        (part, places[low:high] - starts[part])
        for part, (low, high) in enumerate(pairwise(cuts))
        if low < high
    ]
