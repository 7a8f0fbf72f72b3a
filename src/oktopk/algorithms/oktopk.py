"""Ok-Topk: a sparse allreduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..select import corrected, is_due, is_off, keep, keep_largest, kth_largest
from ..wire import Entries, concatenate
from .base import Algorithm, Step
from .exchange import balance, gather, select_region, split_reduce

_FEW = 512
"""Sums that are so few in all that each rank gets all of them and picks the k largest itself:
this takes fewer bytes than a search for the threshold, and one message instead of many."""


@dataclass(frozen=True)
class OkTopk(Algorithm):
    """Regions are summed by their owners, and only the k largest sums go back to everyone.

    1. Accumulate: acc = residual + gradient.
    2. Local threshold: every `threshold_interval` sparse steps the exact k-th largest |acc|,
       between them the last one, corrected by how many it selected. Select what reaches it.
    3. Regions: every `region_interval` sparse steps each rank cuts its entries into P parts of
       equal count, and the cuts are averaged over ranks. Region j belongs to rank j.
    4. Split and reduce: entries go to their region's owner, who sums them.
    5. Global threshold: as in 2, of the sums in all regions; the exact one comes from summed
       histograms, so no values travel for it.
    6. Balance if one rank holds far more than the others, and allgather.
    7. Clear from the residual what this rank offered and all applied.

    Both thresholds are also evaluated anew in any step in which they select more than 10 % too
    many or too few.
    """

    threshold_interval: int = 32
    """Sparse steps between exact thresholds (tau' in the paper)."""
    region_interval: int = 64
    """Sparse steps between new regions (tau in the paper)."""
    balance_trigger: float = 4.0
    """Entries are balanced where a rank holds more than this many times the mean."""

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
        state, k, transport = step.state, step.target, step.transport
        low, threshold = state.boundaries[transport.rank], state.global_threshold
        if k == step.accumulated.numel():
            threshold, exact = 0.0, False
        with step.time("reduce"):
            chosen = select_region(step, region, low, 0.0 if exact else threshold)
            counts = step.share(len(chosen))
            # Counts are the same everywhere, so all ranks take the same way.
            if not exact and is_off(sum(counts), k, threshold):
                exact = True
                chosen = select_region(step, region, low, 0.0)
                counts = step.share(len(chosen))
            few = sum(counts) <= _FEW
            if exact and not few:
                threshold, ties = _global_threshold(step, chosen)
                chosen, counts = _share_ties(step, chosen, threshold, ties)
        with step.time("gather"):
            if max(counts) > self.balance_trigger * sum(counts) / transport.size:
                chosen, counts = balance(step, chosen, counts)
            applied = concatenate(gather(step, chosen, counts))
            if exact and few:
                applied, threshold = keep_largest(applied, k)
        step.global_threshold = threshold
        state.global_threshold = corrected(threshold, len(applied), k)
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


def _global_threshold(step: Step, sums: Entries) -> tuple[float, int]:
    """The k-th largest sum over all ranks, and how many of its equals belong to the k.

    Only counts travel: a few times k words where k is in the hundreds, next to nothing where k is
    large.
    """
    digit_bits = min(11, max(5, int(math.log2(step.target)) - 2))

    def sum_counts(counts: Tensor) -> None:
        narrow = counts.to(step.wire.index_dtype)
        step.transport.all_reduce(narrow)
        counts.copy_(narrow)

    return kth_largest(sums.values, step.target, digit_bits, sum_counts)


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
