"""Ok-Topk: a sparse allreduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..core.select import (
    TOLERANCE,
    Carried,
    aim,
    is_due,
    keep,
    keep_from,
    keep_largest,
    kth_largest,
)
from ..core.transport import PeerError
from ..wire.message import Entries, concatenate
from .base import Algorithm, Step
from .exchange import balance, check_order, cut, encode_parts, gather, receive_parts, split

MANY = 1.5
"""Multiple of k from which on it is cheaper to look for the threshold than to send candidates."""
_FEW = 512
"""Sums that are so few in all that each rank gets all of them and picks the k largest itself:
this takes fewer bytes than a search for the threshold, and one message instead of many."""
_AIM = 0.7
"""Share of the room beyond k that the threshold of messages of fixed size aims at."""


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

    With `capacity`, as by default, messages have a fixed size and 3 to 6 need no more than two
    exchanges; the count is near k, but in single steps it may be smaller. See `_fixed`.
    """

    threshold_interval: int = 32
    """Sparse steps between exact thresholds (tau' in the paper)."""
    region_interval: int = 64
    """Sparse steps between new regions (tau in the paper)."""
    balance_trigger: float = 4.0
    """Entries are balanced where a rank holds more than this many times the mean; the paper's 4
    needs five ranks or more."""
    capacity: float | None = 1.15
    """Room of each message, in multiples of k/P: messages have a fixed size, a step is two
    exchanges and no more, and what does not fit waits. None: ranks exchange sizes first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.balance_trigger >= 1:
            raise ValueError(
                f"balance_trigger is {self.balance_trigger!r}, but must be at least 1: it is the "
                "largest count over the mean above which entries are moved"
            )
        known = isinstance(self.capacity, int | float) and 1 <= self.capacity < math.inf
        if self.capacity is not None and not known:
            raise ValueError(
                f"capacity is {self.capacity!r}, but must be at least 1, such as 1.2, or None: a "
                "message has room for capacity * k / P entries"
            )

    def reduce(self, step: Step) -> Entries:
        state, transport = step.state, step.transport
        local = step.offer(exact=is_due(state.sparse_steps, self.threshold_interval))
        if transport.size == 1:
            step.clear(local, local)
            step.global_threshold = step.local_threshold
            return local
        adapts = self.capacity is None and is_due(state.sparse_steps, self.region_interval)
        if adapts or not state.boundaries:
            with step.time("exchange"):
                state.boundaries = _regions(step, local)
        return self._with_sizes(step, local) if self.capacity is None else self._fixed(step, local)

    def _with_sizes(self, step: Step, local: Entries) -> Entries:
        """Steps 4 to 7, where ranks tell each other how much they send before they send it."""
        k, numel, threshold = step.target, step.accumulated.numel(), step.state.total.value
        if k == numel:
            threshold = 0.0
        wanted, size = aim(k, numel), step.transport.size
        sent, region = split(step, local, step.state.boundaries)
        with step.time("reduce"):
            mine = region.select(step, threshold)
            step.check(mine)
        with step.time("gather"):
            message, rounded = step.wire.encode(mine)
            counts, sizes = step.share(len(mine), message.numel())
            # Counts are the same everywhere, so all ranks take the same way.
            # Where ranks select the same entries there never are as many as aimed at, and the
            # forecast falls in vain: exact steps end that.
            exact = is_due(step.state.sparse_steps, self.threshold_interval)
            needed = wanted if exact else (1 - TOLERANCE) * k
            too_few = sum(counts) < needed and threshold > 0
            if too_few or sum(counts) > MANY * k:
                threshold = 0.0
                mine = region.select(step, threshold)
                counts, _ = step.share(len(mine))
                if sum(counts) > max(_FEW, wanted):
                    threshold, ties = _global_threshold(step, mine, wanted)
                    mine, counts = _share_ties(step, mine, threshold, ties)
                sizes = []
            boundaries: Sequence[int] | None = step.state.boundaries
            if max(counts) > self.balance_trigger * sum(counts) / size:
                mine, sizes = balance(step, mine, counts, step.state.boundaries), []
                boundaries = None
            if not sizes:
                message, rounded = step.wire.encode(mine)
                _, sizes = step.share(len(mine), message.numel())
            parts, _ = gather(step, mine, message, rounded, sizes, boundaries)
            if boundaries is None:
                check_order(step, parts)
        return self._apply(step, sent, mine, rounded, parts, threshold, wanted)

    def _fixed(self, step: Step, local: Entries) -> Entries:
        """Steps 4 to 7 in two exchanges, whose messages have a size that all ranks know before.

        1. What a message has no room for is held back: the smallest entries of a region.
        2. With the entries travels whether all values are finite, and where the program is.
        3. An owner selects sums by the carried threshold, which aims at somewhat more than k, and
           at most as many as there is room for. If these are less than 0.9 of its share of k, the
           threshold is wrong, and it takes as many as are aimed at: so the count cannot fall far,
           without asking the others.
        4. What is applied, which all ranks know, is cut into parts of equal count: these are the
           regions of the next step, so that owners have equal shares.
        """
        assert self.capacity is not None
        state, transport, wire = step.state, step.transport, step.wire
        k, size, rank = step.target, transport.size, transport.rank
        bounds = state.boundaries
        share, numel = k / size, step.accumulated.numel()
        # Counts scatter by about the square root of what is expected. Who asks for everything
        # gets it, though regions may be of any size after a step with many zeros.
        room = self.capacity * share + 2 * math.sqrt(share)
        most = numel if k == numel else math.ceil(min(numel, room))
        wanted = min(numel, math.ceil(k * (1 + min(1.0, self.capacity - 1) * _AIM)))
        spans = [high - low for low, high in pairwise(bounds)]
        with step.time("exchange"):
            parts = cut(local, bounds)
            parts = [
                part if j == rank else self._held_back(step, part, most)
                for j, part in enumerate(parts)
            ]
            here = -1 if transport.place is None else transport.place
            rooms = [wire.room(min(most, span), span, added=2) for span in spans]
            messages, sent = encode_parts(step, parts, (step.finite, here), rooms)
            region, notes = receive_parts(step, parts, messages, [rooms[rank]] * size, bounds, 2)
            notes[rank] = [step.finite, here]
            step.finite = all(finite for finite, _ in notes)
            if transport.place is not None:
                transport.check_places([place for _, place in notes])
        with step.time("reduce"):
            threshold = 0.0 if k == numel else state.total.value
            mine, limit = region.select(step, threshold), most
            wrong = len(mine) < (1 - TOLERANCE) * share and threshold > 0
            if wrong:
                mine, limit = region.select(step, 0.0), math.ceil(wanted / size)
            mine = keep_largest(mine, limit)[0] if len(mine) > limit else mine
            step.check(mine)
        with step.time("gather"):
            message, rounded = wire.encode(mine, [step.finite, wrong], rooms[rank])
            parts, notes = gather(step, mine, message, rounded, rooms, bounds, 2)
            notes[rank] = [step.finite, wrong]
            step.finite = all(finite for finite, _ in notes)
            if any(wrong for _, wrong in notes):
                # What an owner has chosen by itself is not what reaches the threshold: start anew.
                smallest = [float(part.values.abs().min()) for part in parts if len(part)]
                threshold, state.total = min(smallest, default=0.0), Carried()
        applied = self._apply(step, sent, mine, rounded, parts, threshold, wanted)
        if len(applied):
            state.boundaries = (0, *_cuts(step, applied), numel)
        return applied

    def _held_back(self, step: Step, entries: Entries, most: int) -> Entries:
        """As many entries as there is room for, the largest ones."""
        if len(entries) <= most:
            return entries
        step.overflow += len(entries) - most
        return keep_largest(entries, most)[0]

    def _apply(
        self,
        step: Step,
        sent: Entries,
        mine: Entries,
        rounded: Tensor,
        parts: list[Entries],
        threshold: float,
        wanted: int,
    ) -> Entries:
        """The k largest of all sums that ranks gathered; the residual keeps the rest."""
        with step.time("select"):
            gathered = concatenate(parts)
            applied, step.global_threshold, right = keep_from(
                gathered, threshold, step.target, wanted
            )
        step.state.total = step.state.total.after(right)
        step.clear(sent, applied)
        step.keep_rounding(mine, rounded, applied)
        return applied

    def words(self, numel: int, size: int) -> float:
        """6k(P-1)/P: split and reduce, balance, and allgather, 2k(P-1)/P each"""
        return 6 * self.target(numel) * (size - 1) / size


def _regions(step: Step, local: Entries) -> tuple[int, ...]:
    """Boundaries that every rank agrees on: the mean of where each would cut."""
    size, numel = step.transport.size, step.accumulated.numel()
    cuts = torch.tensor(_cuts(step, local), device=step.transport.device)
    step.transport.all_reduce(cuts)
    boundaries = (0, *(cuts // size).tolist(), numel)
    if any(low > high for low, high in pairwise(boundaries)):
        raise _nonsense(step, f"boundaries of regions {boundaries}")
    return boundaries


def _nonsense(step: Step, what: str) -> PeerError:
    """The error to raise because of a sum over ranks that cannot be."""
    return PeerError(
        f"rank {step.transport.rank} of {step.transport.size}: ranks have found {what} together, "
        "which cannot be, so one of them is damaged. Nothing was applied on this rank. Look for a "
        "faulty link or faulty memory, and restart all from the last checkpoint"
    )


def _cuts(step: Step, entries: Entries) -> list[int]:
    """Where to cut entries into parts of equal count, one for each rank."""
    size, numel = step.transport.size, step.accumulated.numel()
    if not len(entries):
        return [numel * j // size for j in range(1, size)]
    positions = torch.arange(1, size, device=entries.indices.device) * len(entries) // size
    cuts: list[int] = entries.indices[positions].tolist()
    return cuts


def _global_threshold(step: Step, sums: Entries, wanted: int) -> tuple[float, int]:
    """The `wanted`-th largest sum over all ranks, and how many of its equals are among those.

    Only counts travel: a few times k words where k is in the hundreds, next to nothing where k is
    large.
    """
    digit_bits = min(11, max(5, int(math.log2(wanted)) - 2))

    def sum_counts(counts: Tensor) -> None:
        narrow = counts.to(step.wire.index_dtype)
        step.transport.all_reduce(narrow)
        if int(narrow.min()) < 0:
            raise _nonsense(step, "negative counts")
        counts.copy_(narrow)

    return kth_largest(sums.values, wanted, digit_bits, sum_counts)


def _share_ties(
    step: Step, sums: Entries, threshold: float, ties: int
) -> tuple[Entries, list[int]]:
    """What is above the threshold, and of what equals it the first `ties` in index order."""
    reached = keep(sums, threshold, len(sums))
    above, _ = step.share(len(keep(reached, threshold, 0)))
    shares = []
    for equal in step.share(len(reached) - above[step.transport.rank])[0]:
        shares.append(min(equal, ties))
        ties -= shares[-1]
    chosen = keep(reached, threshold, shares[step.transport.rank])
    return chosen, [a + share for a, share in zip(above, shares, strict=True)]
