"""Ok-Topk: a sparse allreduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..select import TOLERANCE, aim, is_due, keep, keep_from, kth_largest
from ..wire import Entries, concatenate
from .base import Algorithm, Step
from .exchange import balance, gather, select_region, split_reduce

MANY = 1.5
"""Multiple of k from which on it is cheaper to look for the threshold than to send candidates."""
_FEW = 512
"""Sums that are so few in all that each rank gets all of them and picks the k largest itself:
this takes fewer bytes than a search for the threshold, and one message instead of many."""


@dataclass(frozen=True)
class OkTopk(Algorithm):
    """Regions are summed by their owners, and only the k largest sums go back to everyone.

    1. Accumulate: acc = residual + gradient.
    2. Select the k largest of this rank, by a threshold carried from step to step: it is
       forecast so that somewhat more than k candidates reach it, and the k largest are picked
       from those. Every `threshold_interval` sparse steps it is made certain that they are.
    3. Regions: every `region_interval` sparse steps each rank cuts its entries into P parts of
       equal count, and the cuts are averaged over ranks. Region j belongs to rank j.
    4. Split and reduce: entries go to their region's owner, who sums them.
    5. Global threshold: as in 2, of the sums in all regions. Where it must be exact it comes from
       summed histograms, so no values travel for it.
    6. Balance if one rank holds far more candidates than the others, allgather, and pick the k
       largest.
    7. Clear from the residual what this rank offered and all applied.

    Both thresholds are also evaluated anew in any step in which they select 10 % too few, the
    global one also if it selects 50 % too many. So the count is always within 10 % of k where
    there are that many values, whatever gradients do.
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

    def reduce(self, step: Step) -> Entries:
        state, transport = step.state, step.transport
        exact = is_due(state.sparse_steps, self.threshold_interval)
        local = step.offer(exact)
        if transport.size == 1:
            step.clear(local, local)
            step.global_threshold = step.local_threshold
            return local
        if is_due(state.sparse_steps, self.region_interval) or not state.boundaries:
            with step.time("exchange"):
                state.boundaries = _regions(step, local)
        region = split_reduce(step, local, state.boundaries)
        applied = self._gather_largest(step, region, exact)
        step.clear(local, applied)
        return applied

    def _gather_largest(self, step: Step, region: Tensor, exact: bool) -> Entries:
        """Steps 5 and 6: the k largest sums of all regions, for every rank."""
        k, numel, threshold = step.target, step.accumulated.numel(), step.state.total.value
        if k == numel:
            threshold = 0.0
        wanted = aim(k, numel)
        low, size = step.state.boundaries[step.transport.rank], step.transport.size
        with step.time("reduce"):
            candidates = select_region(step, region, low, threshold)
            counts = step.share(len(candidates))
            # Counts are the same everywhere, so all ranks take the same way.
            # Where ranks select the same entries there never are as many as aimed at, and the
            # forecast falls in vain: exact steps end that.
            needed = wanted if exact else (1 - TOLERANCE) * k
            too_few = sum(counts) < needed and threshold > 0
            if too_few or sum(counts) > MANY * k:
                threshold = 0.0
                candidates = select_region(step, region, low, threshold)
                counts = step.share(len(candidates))
                if sum(counts) > max(_FEW, wanted):
                    threshold, ties = _global_threshold(step, candidates, wanted)
                    candidates, counts = _share_ties(step, candidates, threshold, ties)
        with step.time("gather"):
            if max(counts) > self.balance_trigger * sum(counts) / size:
                candidates, counts = balance(step, candidates, counts)
            gathered = concatenate(gather(step, candidates, counts))
        with step.time("select"):
            applied, step.global_threshold, right = keep_from(gathered, threshold, k, wanted)
        step.state.total = step.state.total.after(right)
        return applied

    def words(self, numel: int, size: int) -> float:
        """6k(P-1)/P: split and reduce, balance, and allgather, 2k(P-1)/P each"""
        return 6 * self.target(numel) * (size - 1) / size


def _regions(step: Step, local: Entries) -> tuple[int, ...]:
    """Boundaries that every rank agrees on: the mean of where each would cut."""
    size, numel = step.transport.size, step.accumulated.numel()
    if len(local):
        positions = torch.arange(1, size, device=local.indices.device) * len(local) // size
        cuts = local.indices[positions].to(torch.int64)
    else:
        cuts = torch.arange(1, size, device=local.indices.device) * numel // size
    step.transport.all_reduce(cuts)
    return (0, *(cuts // size).tolist(), numel)


def _global_threshold(step: Step, sums: Entries, wanted: int) -> tuple[float, int]:
    """The `wanted`-th largest sum over all ranks, and how many of its equals are among those.

    Only counts travel: a few times k words where k is in the hundreds, next to nothing where k is
    large.
    """
    digit_bits = min(11, max(5, int(math.log2(wanted)) - 2))

    def sum_counts(counts: Tensor) -> None:
        narrow = counts.to(step.wire.index_dtype)
        step.transport.all_reduce(narrow)
        counts.copy_(narrow)

    return kth_largest(sums.values, wanted, digit_bits, sum_counts)


def _share_ties(
    step: Step, sums: Entries, threshold: float, ties: int
) -> tuple[Entries, list[int]]:
    """What is above the threshold, and of what equals it the first `ties` in index order."""
    reached = keep(sums, threshold, len(sums))
    above = step.share(len(keep(reached, threshold, 0)))
    shares = []
    for equal in step.share(len(reached) - above[step.transport.rank]):
        shares.append(min(equal, ties))
        ties -= shares[-1]
    chosen = keep(reached, threshold, shares[step.transport.rank])
    return chosen, [a + share for a, share in zip(above, shares, strict=True)]
