"""The patterns of communication that algorithms are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..select import select
from ..wire import Entries, concatenate
from .base import Step

ROUNDS_IN_FLIGHT = 4


def split_reduce(step: Step, local: Entries, boundaries: Sequence[int]) -> Tensor:
    """Send each region's entries to its owner; returns the sums of this rank's region, dense.

    Words sent: 2k(P-1)/P on average over ranks.
    """
    transport, wire, rank = step.transport, step.wire, step.transport.rank
    with step.time("exchange"):
        cuts = torch.tensor(boundaries, dtype=local.indices.dtype, device=transport.device)
        ends: list[int] = torch.searchsorted(local.indices, cuts).tolist()
        parts = [local[start:end] for start, end in pairwise(ends)]
        messages = [wire.encode(part) for part in parts]
        sizes = [n * wire.entry_bytes for n in step.trade([len(part) for part in parts])]
        incoming = transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT)
        low, high = boundaries[rank], boundaries[rank + 1]
        with step.time("reduce"):
            region = step.buffers.zeros(high - low)
            step.kernels.add_at(region, parts[rank].indices - low, parts[rank].values)
        for _, message in incoming:
            with step.time("reduce"):
                part = wire.decode(message)
                step.kernels.add_at(region, part.indices - low, part.values)
    return region


def select_region(step: Step, region: Tensor, low: int, threshold: float) -> Entries:
    """The entries of a region's sums that reach the threshold, with their global indexes."""
    entries = select(region, threshold)
    return Entries(entries.indices.to(step.wire.index_dtype) + low, entries.values)


def gather(step: Step, mine: Entries, counts: Sequence[int]) -> list[Entries]:
    """Every rank's entries, in rank order; counts[j] of them come from rank j.

    Words sent: 2 * len(mine) * (P-1).
    """
    transport, wire = step.transport, step.wire
    parts = [mine[:0]] * transport.size
    parts[transport.rank] = mine
    messages = [wire.encode(mine)] * transport.size
    sizes = [count * wire.entry_bytes for count in counts]
    for source, message in transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
        parts[source] = wire.decode(message)
    return parts


def balance(step: Step, mine: Entries, counts: Sequence[int]) -> tuple[Entries, list[int]]:
    """Move entries between neighbours until every rank holds the same number, up to one.

    Seen in rank order the entries are one sorted list, before and after. Every rank knows all
    counts, so each computes alone what goes where. Words sent: at most 2k(P-1)/P on average.
    """
    transport, wire = step.transport, step.wire
    size, rank = transport.size, transport.rank
    starts = [sum(counts[:j]) for j in range(size + 1)]
    cuts = [starts[-1] * j // size for j in range(size + 1)]

    def overlap(holder: int, receiver: int) -> slice:
        """The part of the holder's entries that the receiver gets."""
        low = max(starts[holder], cuts[receiver]) - starts[holder]
        high = min(starts[holder + 1], cuts[receiver + 1]) - starts[holder]
        return slice(low, max(low, high))

    parts = [mine[overlap(rank, j)] for j in range(size)]
    messages = [wire.encode(part) for part in parts]
    shares = [overlap(j, rank) for j in range(size)]
    sizes = [(share.stop - share.start) * wire.entry_bytes for share in shares]
    received = {rank: parts[rank]}
    for source, message in transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
        received[source] = wire.decode(message)
    balanced = concatenate([received[source] for source in sorted(received)])
    return balanced, [end - start for start, end in pairwise(cuts)]


def gather_sum(step: Step, local: Entries) -> Entries:
    """Every rank gets every rank's entries and sums them, in rank order: the same on all.

    Words sent: 2k(P-1). This is the whole exchange of TopkA and Gaussiank.
    """
    with step.time("gather"):
        parts = gather(step, local, step.share(len(local)))
    if len(parts) == 1:
        return local
    with step.time("reduce"):
        sums = step.buffers.zeros(step.accumulated.numel())
        for part in parts:
            step.kernels.add_at(sums, part.indices, part.values)
        return select(sums, 0.0)
