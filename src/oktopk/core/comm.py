"""Comm: how an algorithm talks to the other ranks in one step.

It adds to `Transport` what every exchange of entries needs: the wire format, checks of each message
that arrives, and an agreement on whether all values are finite. That agreement costs no message of
its own. One flag travels with the numbers and entries that ranks send anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from ..kernels import for_device
from ..wire.message import DamagedMessageError, Entries, Wire, concatenate
from .stats import Stopwatch
from .transport import PeerError, Transport


class Comm:
    """The ranks of one reduction, as one of them sees the others during one step.

    Args:
        transport: the process group.
        wire: how entries travel.
        numel: number of elements of the vector.
    """

    def __init__(self, transport: Transport, wire: Wire, numel: int) -> None:
        self.transport = transport
        self.rank, self.size, self.device = transport.rank, transport.size, transport.device
        self.wire = wire
        self.numel = numel
        self.kernels = for_device(transport.device)
        self.time = Stopwatch()
        self.finite = True
        """Whether all values are finite: on this rank at first, on all ranks at the end. A NaN does
        no harm before the step is committed."""

    def check(self, sums: Entries) -> None:
        """Notice finite values with an infinite sum, before a wire format rounds the sum."""
        if not _all_finite(sums.values):
            self.finite = False

    def trade(self, rows: list[list[int]]) -> list[list[int]]:
        """Send rows[j], a few numbers, to rank j; return each rank's row for this one."""
        traded = self.transport.trade_numbers([[*row, self.finite] for row in rows])
        self.finite = all(row[-1] for row in traded)
        return [row[:-1] for row in traded]

    def share(self, count: int, size: int = 0) -> tuple[list[int], list[int]]:
        """Every rank's count, and every rank's size, in rank order."""
        shared = self.trade([[count, size]] * self.size)
        for source, (number, _) in enumerate(shared):
            if not 0 <= number <= self.numel:
                raise self.damaged(source, f"it claims {number} entries")
        return [row[0] for row in shared], [row[1] for row in shared]

    def check_sizes(self, sizes: Sequence[int], most: Sequence[int]) -> None:
        """Check the sizes that senders announced, before memory is set aside for the messages."""
        for source, (size, limit) in enumerate(zip(sizes, most, strict=True)):
            if source != self.rank and not 0 < size <= limit:
                raise self.damaged(source, f"it claims {size} bytes, but can have 1 to {limit}")

    def decode(
        self,
        message: Tensor,
        source: int,
        low: int = 0,
        high: int | None = None,
        added: int = 0,
        wire: Wire | None = None,
    ) -> tuple[Entries, list[int]]:
        """Read a message of rank `source`: entries of elements `low` to `high`, and added numbers.

        If there are added numbers, the first one says whether the sender's values are finite. If
        there are none, ranks have traded this before.
        """
        wire = wire or self.wire
        try:
            entries, numbers = wire.decode(
                message, low, self.numel if high is None else high, added
            )
        except DamagedMessageError as error:
            raise self.damaged(source, str(error)) from error
        said_finite = numbers[0] if numbers else self.finite
        if said_finite and not wire.always_finite and not _all_finite(entries.values):
            raise self.damaged(source, "it has a NaN or Inf, but its sender reported none")
        return entries, numbers

    def decode_all(
        self,
        messages: Tensor,
        sizes: Sequence[int],
        bounds: Sequence[tuple[int, int]],
        own: Entries,
        added: int,
    ) -> tuple[Entries, list[int], list[list[int]]]:
        """`decode` of a message of each other rank: all entries in rank order, those of this rank
        among them, where those of each rank end, and the added numbers. See `Wire.decode_all`."""
        decoded = self.wire.decode_all(messages, sizes, bounds, self.rank, own, added)
        if decoded is not None and self.wire.always_finite:
            return decoded
        parts, numbers = [], []
        for source, (message, (low, high)) in enumerate(
            zip(messages.split(list(sizes)), bounds, strict=True)
        ):
            if source == self.rank:
                part, row = own, [0] * added
            else:
                part, row = self.decode(message, source, low, high, added)
            parts.append(part)
            numbers.append(row)
        return concatenate(parts), list(accumulate(map(len, parts))), numbers

    def damaged(self, source: int, why: str) -> PeerError:
        """The error to raise for a message that cannot be right."""
        return PeerError(
            f"rank {self.rank} of {self.size}: a message from rank {source} is damaged: {why}. "
            "Nothing was applied on this rank. Look for a faulty link or faulty memory, make sure "
            "that all ranks run the same version, and restart all from the last checkpoint"
        )

    def nonsense(self, what: str) -> PeerError:
        """The error to raise for a sum over ranks that cannot be right."""
        return PeerError(
            f"rank {self.rank} of {self.size}: the ranks together computed {what}, which is "
            "impossible, so one of them is damaged. Nothing was applied on this rank. Look for a "
            "faulty link or faulty memory, and restart all from the last checkpoint"
        )


def _all_finite(values: Tensor) -> bool:
    """A sum is finite only if all values are, and it is the fastest thing to look at."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())
