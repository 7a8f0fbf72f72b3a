"""Comm: how an algorithm talks to the other ranks in one step.

It adds to `Transport` what every exchange of entries needs: the wire format, checks of each message
that arrives, and an agreement on whether all values are finite. That agreement costs no message of
its own. One flag travels with the numbers and entries that ranks send anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..kernels import for_device
from ..kernels.plan import Record
from ..wire.message import DamagedMessageError, Entries, Wire
from .stats import Stopwatch
from .transport import PeerError, Rider, Transport


class Comm:
    """The ranks of one reduction, as one of them sees the others during one step.

    Args:
        transport: the process group.
        wire: how entries travel.
        numel: number of elements of the vector.
        rider: a vector of other elements, to be summed on the way if that is possible.
    """

    def __init__(
        self, transport: Transport, wire: Wire, numel: int, rider: Rider | None = None
    ) -> None:
        self.transport = transport
        self.rank, self.size, self.device = transport.rank, transport.size, transport.device
        self.wire = wire
        self.numel = numel
        self.rider = rider
        self.kernels = for_device(transport.device)
        self.time = Stopwatch()
        self.finite = True
        """Whether all values are finite: on this rank at first, on all ranks at the end. A NaN does
        no harm before the step is committed."""

    @property
    def point(self) -> int:
        """This rank's program point, to travel with messages; see `Transport.point`."""
        return -1 if self.transport.point is None else self.transport.point

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

    def check_record(self, record: Record) -> None:
        """Fail if a step's messages were damaged, or if ranks are not at one point of the program.
        Take over whether all values are finite."""
        if self.transport.point is not None:
            self.transport.check_points(record.points)
        if record.damaged:
            receiver, source = divmod(record.damaged - 1, self.size)
            raise self.damaged(source, "it is no message of this step", receiver)
        self.finite = record.finite

    def damaged(self, source: int, why: str, receiver: int | None = None) -> PeerError:
        """The error to raise for a message that cannot be right."""
        to = "" if receiver in (None, self.rank) else f" to rank {receiver}"
        return PeerError(
            f"rank {self.rank} of {self.size}: a message from rank {source}{to} is damaged: {why}. "
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
