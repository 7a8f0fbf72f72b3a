"""The patterns of communication that algorithms are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..core.comm import Comm
from ..core.select import smallest
from ..wire.message import Entries, Wire, concatenate

ROUNDS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Region:
    """The entries that all ranks offer of the elements `low` to `high`, summed by one rank."""

    entries: Entries
    """The entries of each rank, in rank order."""
    ends: list[int]
    """Where those of each rank end."""
    low: int
    high: int

    def select(self, comm: Comm, threshold: float) -> Entries:
        """The sums that reach a threshold, except zeros."""
        threshold = max(threshold, smallest(comm.wire.value_dtype))
        i, v = self.entries.indices, self.entries.values
        return Entries(*comm.kernels.sum_select(i, v, self.ends, self.low, self.high, threshold))


def region_of(parts: Sequence[Entries], low: int, high: int) -> Region:
    """The region to which each rank has offered a part."""
    return Region(concatenate(parts), list(accumulate(map(len, parts))), low, high)


def ends_of(local: Entries, boundaries: Sequence[int]) -> list[int]:
    """Where the entries of each region end."""
    stops = torch.tensor(boundaries[1:], dtype=local.indices.dtype, device=local.indices.device)
    ends: list[int] = torch.searchsorted(local.indices, stops).tolist()
    return ends


def split(comm: Comm, local: Entries, boundaries: Sequence[int]) -> tuple[Entries, Region]:
    """Send each region's entries to its owner, after an exchange of sizes.

    Words sent: 2k(P-1)/P on average over ranks.

    Returns:
        The entries that this rank offered, with the values that the owners read.
        This rank's region.
    """
    rank, low, high = comm.rank, boundaries[comm.rank], boundaries[comm.rank + 1]
    with comm.time("exchange"):
        parts = [local[start:end] for start, end in pairwise([0, *ends_of(local, boundaries)])]
        messages = [torch.empty(0, dtype=torch.uint8, device=comm.device)] * comm.size
        sent = [part.values for part in parts]
        for target, part in enumerate(parts):
            if target != rank:
                messages[target], sent[target] = comm.wire.encode(part)
        sizes = [size for (size,) in comm.trade([[message.numel()] for message in messages])]
        comm.check_sizes(sizes, [comm.wire.room(high - low, high - low)] * comm.size)
        for source, message in comm.transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
            parts[source], _ = comm.decode(message, source, low, high)
    return Entries(local.indices, torch.cat(sent)), region_of(parts, low, high)


def gather(
    comm: Comm,
    mine: Entries,
    message: Tensor,
    sent: Tensor,
    sizes: list[int],
    boundaries: Sequence[int] | None,
    wires: Sequence[Wire] = (),
) -> list[Entries]:
    """Every rank's entries, in rank order.

    Words sent: 2 * len(mine) * (P-1).

    Args:
        message: in which `mine` travels, with the values `sent`.
        sizes: of each rank's message.
        boundaries: between the entries of a rank and those of the next; None if there are none.
        wires: how each rank's entries are written, if not all as the step says.
    """
    transport, numel = comm.transport, comm.numel
    bounds = [(0, numel)] * transport.size if boundaries is None else list(pairwise(boundaries))
    wires = wires or [comm.wire] * transport.size
    spans = [high - low for low, high in bounds]
    comm.check_sizes(
        sizes, [wire.room(span, span) for wire, span in zip(wires, spans, strict=True)]
    )
    parts = [Entries(mine.indices, sent)] * transport.size
    messages = [message] * transport.size
    for source, received in transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
        parts[source], _ = comm.decode(received, source, *bounds[source], wire=wires[source])
    return parts


def check_order(comm: Comm, parts: Sequence[Entries]) -> None:
    """That each rank's entries come behind those of the ranks before it."""
    last = -1
    for source, part in enumerate(parts):
        if len(part) and int(part.indices[0]) <= last:
            raise comm.damaged(source, "its entries should come behind those of the ranks before")
        last = int(part.indices[-1]) if len(part) else last


def balance(comm: Comm, mine: Entries, counts: Sequence[int], boundaries: Sequence[int]) -> Entries:
    """Move entries between neighbours until every rank holds the same number, up to one.

    Seen in rank order the entries are one sorted list, before and after. Every rank knows all
    counts, so each computes alone what goes where. Nothing is rounded, as these entries travel
    once more. Words sent: at most 2k(P-1)/P on average.
    """
    transport = comm.transport
    size, rank = transport.size, transport.rank
    wire = Wire("plain", comm.wire.index_dtype, comm.wire.value_dtype)
    starts = [sum(counts[:j]) for j in range(size + 1)]
    cuts = [starts[-1] * j // size for j in range(size + 1)]

    def overlap(holder: int, receiver: int) -> slice:
        """The part of the holder's entries that the receiver gets."""
        low = max(starts[holder], cuts[receiver]) - starts[holder]
        high = min(starts[holder + 1], cuts[receiver + 1]) - starts[holder]
        return slice(low, max(low, high))

    parts = [mine[overlap(rank, j)] for j in range(size)]
    # No message where there is nothing to move; receivers know that, too.
    nothing = torch.empty(0, dtype=torch.uint8, device=transport.device)
    messages = [
        wire.encode(part, nbytes=wire.room(len(part), 0))[0]
        if len(part) and target != rank
        else nothing
        for target, part in enumerate(parts)
    ]
    shares = [overlap(j, rank) for j in range(size)]
    moved = [share.stop - share.start for share in shares]
    sizes = [wire.room(count, 0) if count else 0 for count in moved]
    received = {rank: parts[rank]}
    for source, message in transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
        low, high = boundaries[source], boundaries[source + 1]
        received[source], _ = comm.decode(message, source, low, high, wire=wire)
    return concatenate([received[source] for source in sorted(received)])


def gather_sum(comm: Comm, local: Entries) -> tuple[Entries, Entries]:
    """Every rank gets every rank's entries and sums them, in rank order: the same on all.

    Words sent: 2k(P-1). This is the whole exchange of TopkA and Gaussiank.

    Returns:
        The entries that this rank offered, as all ranks read them.
        The sums.
    """
    if comm.size == 1:
        return local, local
    with comm.time("gather"):
        message, sent = comm.wire.encode(local)
        _, sizes = comm.share(len(local), message.numel())
        parts = gather(comm, local, message, sent, sizes, boundaries=None)
    with comm.time("reduce"):
        sums = region_of(parts, 0, comm.numel).select(comm, 0.0)
    return parts[comm.rank], sums
