"""The patterns of communication that algorithms are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..core.select import smallest
from ..wire.message import Entries, Wire, concatenate
from .base import Step

ROUNDS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Region:
    """What all ranks offer of the elements `low` to `high`, which one rank sums."""

    parts: list[Entries]
    """Of each rank, in rank order."""
    low: int
    high: int

    def select(self, step: Step, threshold: float) -> Entries:
        """The sums that reach a threshold, except zeros."""
        joined = concatenate(self.parts)
        ends, end = [], 0
        for part in self.parts:
            end += len(part)
            ends.append(end)
        threshold = max(threshold, smallest(step.wire.value_dtype))
        sums = step.kernels.sum_select(
            joined.indices, joined.values, ends, self.low, self.high, threshold
        )
        return Entries(*sums)


def cut(local: Entries, boundaries: Sequence[int]) -> list[Entries]:
    """The entries of each region."""
    cuts = torch.tensor(boundaries, dtype=local.indices.dtype, device=local.indices.device)
    ends: list[int] = torch.searchsorted(local.indices, cuts).tolist()
    return [local[start:end] for start, end in pairwise(ends)]


def split(step: Step, local: Entries, boundaries: Sequence[int]) -> tuple[Entries, Region]:
    """Send each region's entries to its owner.

    Words sent: 2k(P-1)/P on average over ranks.

    Returns:
        What this rank offered, with the values that the owners read.
        This rank's region.
    """
    with step.time("exchange"):
        parts = cut(local, boundaries)
        messages, sent = encode_parts(step, parts)
        sizes = [size for (size,) in step.trade([[message.numel()] for message in messages])]
        region, _ = receive_parts(step, parts, messages, sizes, boundaries)
    return sent, region


def encode_parts(
    step: Step, parts: list[Entries], added: Sequence[int] = (), sizes: Sequence[int] = ()
) -> tuple[list[Tensor], Entries]:
    """A message for every other rank, and what is in them all and in this rank's own part.

    Args:
        added: numbers to travel with each.
        sizes: of the messages; as small as they can be if there are none.
    """
    rank, device = step.transport.rank, step.transport.device
    messages, sent = [], []
    for target, part in enumerate(parts):
        if target == rank:
            messages.append(torch.empty(0, dtype=torch.uint8, device=device))
            sent.append(part)
        else:
            nbytes = sizes[target] if sizes else None
            message, values = step.wire.encode(part, added, nbytes)
            messages.append(message)
            sent.append(Entries(part.indices, values))
    return messages, concatenate(sent)


def receive_parts(
    step: Step,
    parts: list[Entries],
    messages: list[Tensor],
    sizes: list[int],
    boundaries: Sequence[int],
    added: int = 0,
) -> tuple[Region, list[list[int]]]:
    """Exchange one message with each rank: this rank's region, and the numbers that were added."""
    rank = step.transport.rank
    low, high = boundaries[rank], boundaries[rank + 1]
    check_sizes(step, sizes, [step.wire.room(high - low, high - low, added)] * len(sizes))
    region = Region(list(parts), low, high)
    numbers: list[list[int]] = [[]] * step.transport.size
    for source, message in step.transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
        region.parts[source], numbers[source] = step.decode(message, source, low, high, added)
    return region, numbers


def check_sizes(step: Step, sizes: Sequence[int], most: Sequence[int]) -> None:
    """Before memory is set aside for messages: their sizes, as their senders have told them."""
    for source, (size, limit) in enumerate(zip(sizes, most, strict=True)):
        if source != step.transport.rank and not 0 < size <= limit:
            raise step.damaged(source, f"it is to have {size} bytes, and can have 1 to {limit}")


def gather(
    step: Step,
    mine: Entries,
    message: Tensor,
    sent: Tensor,
    sizes: list[int],
    boundaries: Sequence[int] | None,
    added: int = 0,
    wires: Sequence[Wire] = (),
) -> tuple[list[Entries], list[list[int]]]:
    """Every rank's entries, in rank order, and the numbers added to their messages.

    Words sent: 2 * len(mine) * (P-1).

    Args:
        message: in which `mine` travels, with the values `sent`.
        sizes: of each rank's message.
        boundaries: between the entries of a rank and those of the next; None if there are none.
        added: how many numbers are added to each message.
        wires: how each rank's entries are written, if not all as the step says.
    """
    transport, numel = step.transport, step.accumulated.numel()
    bounds = [(0, numel)] * transport.size if boundaries is None else list(pairwise(boundaries))
    wires = wires or [step.wire] * transport.size
    spans = [high - low for low, high in bounds]
    most = [wire.room(span, span, added) for wire, span in zip(wires, spans, strict=True)]
    check_sizes(step, sizes, most)
    parts = [mine[:0]] * transport.size
    numbers: list[list[int]] = [[]] * transport.size
    parts[transport.rank] = Entries(mine.indices, sent)
    messages = [message] * transport.size
    for source, received in transport.exchange(messages, sizes, ROUNDS_IN_FLIGHT):
        parts[source], numbers[source] = step.decode(
            received, source, *bounds[source], added, wires[source]
        )
    return parts, numbers


def check_order(step: Step, parts: Sequence[Entries]) -> None:
    """That each rank's entries come behind those of the ranks before it."""
    last = -1
    for source, part in enumerate(parts):
        if len(part) and int(part.indices[0]) <= last:
            raise step.damaged(source, "its entries should come behind those of the ranks before")
        last = int(part.indices[-1]) if len(part) else last


def balance(step: Step, mine: Entries, counts: Sequence[int], boundaries: Sequence[int]) -> Entries:
    """Move entries between neighbours until every rank holds the same number, up to one.

    Seen in rank order the entries are one sorted list, before and after. Every rank knows all
    counts, so each computes alone what goes where. Nothing is rounded, as these entries travel
    once more. Words sent: at most 2k(P-1)/P on average.
    """
    transport = step.transport
    size, rank = transport.size, transport.rank
    wire = Wire("plain", step.wire.index_dtype, step.wire.value_dtype)
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
        received[source], _ = step.decode(message, source, low, high, wire=wire)
    return concatenate([received[source] for source in sorted(received)])


def gather_sum(step: Step, local: Entries) -> tuple[Entries, Entries]:
    """Every rank gets every rank's entries and sums them, in rank order: the same on all.

    Words sent: 2k(P-1). This is the whole exchange of TopkA and Gaussiank.

    Returns:
        What this rank offered, as all read it.
        The sums.
    """
    if step.transport.size == 1:
        return local, local
    with step.time("gather"):
        message, sent = step.wire.encode(local)
        _, sizes = step.share(len(local), message.numel())
        parts, _ = gather(step, local, message, sent, sizes, boundaries=None)
    with step.time("reduce"):
        sums = Region(parts, 0, step.accumulated.numel()).select(step, 0.0)
    return parts[step.transport.rank], sums
