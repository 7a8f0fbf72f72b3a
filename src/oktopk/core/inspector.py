"""Inspector: looks into the steps of a reducer on one rank. It changes nothing, and sends nothing.

A transaction asks it only if there is one. `Waits` follows a few elements in each step. The rest is
computed in steps that are due, where it takes passes over residual and gradient, and waits for the
device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..algorithms import Dense
from ..kernels import Kernels, for_device
from ..kernels.numbers import OCTAVE, from_bits
from .buckets import Bucket
from .detail import BucketDetail, Detail, Magnitudes, MessageCount, Staleness
from .reduction import Attempt, counts_of
from .select import kth_largest
from .staleness import Waits, together
from .transport import Transport

SAMPLE = 4096
"""Elements of each bucket whose staleness is followed."""
_FRACTION_BITS = 8
"""Of a magnitude, to tell the halves of an octave apart."""


@dataclass(frozen=True)
class _Look:
    """A bucket before it is reduced."""

    step: int
    magnitudes: Magnitudes
    exact_threshold: float


class Inspector:
    """Only the communication thread calls its methods.

    Args:
        buckets: of the reducer.
        transport: of the reducer, for messages that belong to no bucket.
        tell: is called with each detail.
        due: whether to make a detail of the step with this number.
        sample: elements of each bucket whose staleness is followed.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transport: Transport,
        tell: Callable[[Detail], object],
        due: Callable[[int], bool],
        sample: int = SAMPLE,
    ) -> None:
        self._buckets, self._tell, self._due = buckets, tell, due
        self._waits = [Waits(bucket, sample) for bucket in buckets if not bucket.small]
        self._looks: dict[Bucket, _Look] = {}
        self._messages: Counter[tuple[str, int]] = Counter()
        self._transports = [transport, *(bucket.reduction.transport for bucket in buckets)]
        self._count_in(self._messages)

    def close(self) -> None:
        """Look at nothing more."""
        self._count_in(None)

    def _count_in(self, counter: Counter[tuple[str, int]] | None) -> None:
        for transport in self._transports:
            transport.counter = counter

    def before(self, bucket: Bucket, gradient: Sequence[Tensor], factor: float) -> None:
        """A bucket is about to be reduced. Its averages may take the place of its gradient."""
        reduction = bucket.reduction
        if not self._due(reduction.steps):
            return
        values = reduction.sum_with(gradient, factor)
        exact = 0.0 if reduction.dense else kth_largest(values, reduction.target)[0]
        self._looks[bucket] = _Look(
            reduction.steps,
            magnitudes_of(values, dense=isinstance(reduction.algorithm, Dense)),
            exact if math.isfinite(exact) else 0.0,
        )

    def after(self) -> None:
        """A step was committed."""
        step = self._buckets[0].reduction.steps - 1
        for waits in self._waits:
            waits.after(step)
        looks = {bucket: look for bucket, look in self._looks.items() if look.step == step}
        self._looks.clear()
        if len(looks) == len(self._buckets):  # not of a step that began before the inspection
            self._tell(self._detail(step, looks))

    def rewind(self) -> None:
        """Exchange the present with what was before the last step."""
        for waits in self._waits:
            waits.rewind()

    def begin_again(self) -> None:
        """A state was loaded: waits until now say nothing about its residual and its steps."""
        for waits in self._waits:
            waits.begin()

    def staleness(self) -> Staleness | None:
        """Of all that was applied in sparse steps until now; None if everything is small."""
        step = self._buckets[0].reduction.steps - 1
        return together([waits.total(step) for waits in self._waits]) if self._waits else None

    def _detail(self, step: int, looks: dict[Bucket, _Look]) -> Detail:
        details = [
            _bucket_detail(index, bucket, looks[bucket])
            for index, bucket in enumerate(self._buckets)
        ]
        sparse = any(bucket.attempt is not None and bucket.attempt.sparse for bucket in looks)
        taken = [waits.take(step) for waits in self._waits]
        messages = sorted(self._messages.items())
        self._messages.clear()
        return Detail(
            step=step,
            phase="sparse" if sparse else "dense",
            buckets=tuple(details),
            staleness=together(taken) if sparse else None,
            messages=tuple(MessageCount(*key, count) for key, count in messages),
        )


def _bucket_detail(index: int, bucket: Bucket, look: _Look) -> BucketDetail:
    attempt, stats = bucket.attempt, bucket.reduction.last
    assert attempt is not None
    assert stats is not None
    return BucketDetail(
        index=index,
        numel=stats.numel,
        k=stats.target,
        offered=stats.selected_local,
        applied=stats.selected_global,
        local_threshold=stats.local_threshold,
        exact_threshold=look.exact_threshold,
        global_threshold=stats.global_threshold,
        regions=_by_region(attempt),
        magnitudes=look.magnitudes,
    )


def _by_region(attempt: Attempt) -> tuple[int, ...]:
    """Entries applied in each region."""
    regions = attempt.reduced.regions
    if not regions:
        return ()
    applied = torch.cat([part != 0 for part in attempt.acc.out]).nonzero().flatten()
    return tuple(counts_of([high - low for low, high in pairwise(regions)], applied))


def magnitudes_of(values: Tensor, dense: bool = False) -> Magnitudes:
    """The histogram of magnitudes, from one pass over their leading digits.

    Args:
        dense: whether no kernels are compiled, as nothing is selected.
    """
    dtype = values.dtype
    kernels = Kernels if dense else for_device(values.device)
    shift = OCTAVE[dtype].bit_length() - 1 - _FRACTION_BITS
    counts = kernels.histogram(values, 0, shift, 8 * dtype.itemsize - 1 - shift)
    found: Counter[int] = Counter()
    for digit in counts.nonzero().flatten().tolist():
        least = from_bits(digit << shift, dtype)
        if 0 < least < math.inf:  # digit 0 has zeros, and the tiniest denormals
            found[math.floor(2 * math.log2(least))] += int(counts[digit])
    lowest = min(found, default=0)
    bins = range(lowest, max(found) + 1) if found else ()
    return Magnitudes(lowest, tuple(found[each] for each in bins))
