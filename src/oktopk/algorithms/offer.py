"""Which entries a rank offers: its k largest."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import TOLERANCE, Carried, aim, keep_from, kth_largest, lowered, select
from ..wire.message import Entries


@dataclass(frozen=True)
class Offer:
    """The entries that a rank selected, and the threshold for its next step."""

    entries: Entries
    threshold: float
    """Magnitude that all of them reach."""
    carried: Carried
    """Threshold to try in the next step."""


def offer(acc: Accumulator, comm: Comm, carried: Carried, exact: bool) -> Offer:
    """Accumulate, and select the k largest entries of this rank, or at least 0.9 k of them.

    1. One pass accumulates and finds candidates, by the carried threshold.
    2. If there are too few (fewer than k if `exact`, else fewer than 0.9 k), a second pass finds
       the exact threshold.
    3. The k largest candidates are the offer.
    """
    threshold = 0.0 if acc.k == acc.numel else carried.value
    wanted, dtype = aim(acc.k, acc.numel), acc.values.dtype
    entries, found, limit, about = acc.offer(threshold, wanted)
    if found > acc.k:
        right = about if found >= wanted else lowered(threshold, found, wanted, dtype)
        return Offer(entries, limit, carried.after(right, dtype))
    with comm.time("select"):
        if found < (acc.k if exact else (1 - TOLERANCE) * acc.k) and threshold > 0:
            threshold, _ = kth_largest(acc.values, wanted)
            entries = select(acc.values, threshold)
        entries, threshold, right = keep_from(entries, threshold, acc.k, wanted)
    return Offer(entries, threshold, carried.after(right, dtype))
