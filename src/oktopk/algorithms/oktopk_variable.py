"""Ok-Topk as published: messages are as large as they need to be, and sizes travel first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import TOLERANCE, aim, is_due, keep, keep_from, kth_largest
from ..wire.message import Entries, concatenate
from .base import Algorithm, Reduced
from .exchange import balance, check_order, gather, split
from .offer import offer
from .oktopk import OkTopkState
from .regions import agree_on_regions

MANY = 1.5
"""Multiple of k from which on it is cheaper to look for the threshold than to send candidates."""
_FEW = 512
"""Sums that are so few in all that each rank gets all of them and picks the k largest itself. This
takes fewer bytes than a search for the threshold, and one message instead of many."""


@dataclass(frozen=True)
class OkTopkVariable(Algorithm[OkTopkState]):
    """Owners sum their regions, and only the k largest sums go back to everyone.

    1. Offer: accumulate, and select the k largest entries of this rank, by a threshold carried
       from step to step. Every `threshold_interval` sparse steps the selection is exact.
    2. Regions: every `region_interval` sparse steps each rank cuts its offer into P parts of equal
       count, and the cuts are averaged over ranks. Region j belongs to rank j.
    3. Split and reduce: offered entries go to their region's owner, who sums them.
    4. Global threshold: carried as in 1, over the sums of all regions. Where it must be exact it
       comes from summed histograms, so no values travel for it.
    5. Balance if one rank holds far more candidates than the others, then gather.
    6. Apply the k largest. Clear the applied entries from the residual of each rank that offered
       them.

    Both thresholds are evaluated anew in any step in which they select 10 % too few, and the global
    one also if it selects 50 % too many. So the count is always within 10 % of k where there are
    that many values.
    """

    threshold_interval: int = 32
    """Sparse steps between exact thresholds (tau' in the paper)."""
    region_interval: int = 64
    """Sparse steps between new regions (tau in the paper)."""
    balance_trigger: float = 4.0
    """Entries are balanced where a rank holds more than this many times the mean; the paper's 4
    needs five ranks or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.balance_trigger >= 1:
            raise ValueError(
                f"balance_trigger is {self.balance_trigger!r}, but must be at least 1: it is the "
                "largest count over the mean above which entries are moved"
            )

    def init(self) -> OkTopkState:
        return OkTopkState()

    def reduce(
        self, state: OkTopkState, acc: Accumulator, comm: Comm
    ) -> tuple[Reduced, OkTopkState]:
        exact = is_due(state.steps, self.threshold_interval)
        offered = offer(acc, comm, state.local, exact)
        if comm.size == 1:
            applied, reach = offered.entries, offered.threshold
            acc.clear(applied, applied)
            after = OkTopkState(state.steps + 1, offered.carried, state.total)
            return Reduced(applied, acc.values, len(applied), reach, reach), after
        regions = state.boundaries
        if is_due(state.steps, self.region_interval) or not regions:
            with comm.time("exchange"):
                regions = agree_on_regions(comm, offered.entries)
        sent, region = split(comm, offered.entries, regions)
        threshold = 0.0 if acc.k == acc.numel else state.total.value
        wanted = aim(acc.k, acc.numel)
        with comm.time("reduce"):
            mine = region.select(comm, threshold)
            comm.check(mine)
        with comm.time("gather"):
            message, rounded = comm.wire.encode(mine)
            counts, sizes = comm.share(len(mine), message.numel())
            # Counts are the same on all ranks, so all take the same branches. Where ranks select
            # the same entries, there are never as many sums as aimed at, and the forecast falls in
            # vain: exact steps end that.
            needed = wanted if exact else (1 - TOLERANCE) * acc.k
            if (sum(counts) < needed and threshold > 0) or sum(counts) > MANY * acc.k:
                mine, sizes, threshold = region.select(comm, 0.0), [], 0.0
                counts, _ = comm.share(len(mine))
                if sum(counts) > max(_FEW, wanted):
                    threshold, ties = _global_threshold(comm, mine, wanted)
                    mine, counts = _share_ties(comm, mine, threshold, ties)
            bounds: Sequence[int] | None = regions
            if max(counts) > self.balance_trigger * sum(counts) / comm.size:
                mine, sizes, bounds = balance(comm, mine, counts, regions), [], None
            if not sizes:
                message, rounded = comm.wire.encode(mine)
                _, sizes = comm.share(len(mine), message.numel())
            parts = gather(comm, mine, message, rounded, sizes, bounds)
            if bounds is None:
                check_order(comm, parts)
        with comm.time("select"):
            gathered = concatenate(parts)
            applied, global_threshold, right = keep_from(gathered, threshold, acc.k, wanted)
        acc.clear(sent, applied)
        acc.keep_rounding(mine, rounded, applied)
        reduced = Reduced(
            applied,
            acc.values,
            len(offered.entries),
            offered.threshold,
            global_threshold,
            regions=tuple(regions),
        )
        total = state.total.after(right, acc.values.dtype)
        return reduced, OkTopkState(state.steps + 1, offered.carried, total, regions)

    def words(self, numel: int, size: int) -> float:
        """6k(P-1)/P: split and reduce, balance, and gather, 2k(P-1)/P each"""
        return 6 * self.target(numel) * (size - 1) / size


def _global_threshold(comm: Comm, sums: Entries, wanted: int) -> tuple[float, int]:
    """The `wanted`-th largest sum over all ranks, and how many of its equals are among those.

    Only counts travel: a few times k words where k is in the hundreds, next to nothing where k is
    large.
    """
    digit_bits = min(11, max(5, int(math.log2(wanted)) - 2))

    def sum_counts(counts: Tensor) -> None:
        narrow = counts.to(comm.wire.index_dtype)
        comm.transport.all_reduce(narrow)
        if int(narrow.min()) < 0:
            raise comm.nonsense("negative counts")
        counts.copy_(narrow)

    return kth_largest(sums.values, wanted, digit_bits, sum_counts)


def _share_ties(
    comm: Comm, sums: Entries, threshold: float, ties: int
) -> tuple[Entries, list[int]]:
    """The sums above the threshold and, in index order, the first `ties` that equal it."""
    reached = keep(sums, threshold, len(sums))
    above, _ = comm.share(len(keep(reached, threshold, 0)))
    shares = []
    for equal in comm.share(len(reached) - above[comm.rank])[0]:
        shares.append(min(equal, ties))
        ties -= shares[-1]
    chosen = keep(reached, threshold, shares[comm.rank])
    return chosen, [a + share for a, share in zip(above, shares, strict=True)]
