"""gTopk: a tree of pairwise merges that keep k entries each, then a broadcast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import keep_largest
from ..wire.message import Entries
from .base import Algorithm, Reduced
from .offer import offer
from .topka import TopkState


@dataclass(frozen=True)
class GTopk(Algorithm[TopkState]):
    """Merge the ranks' entries two by two; only k survive each merge.

    1. Offer: accumulate, and take the k largest entries of this rank out of the residual.
    2. For distance 1, 2, 4 ...: a rank at an odd multiple of the distance sends its entries to
       the rank that far below and is done; that rank adds them to its own and keeps the k
       largest. Entries that a merge drops go into the merging rank's residual. Any P works: a
       rank without a partner waits for the next distance.
    3. Rank 0 holds the result; it goes back through the tree.
    """

    def init(self) -> TopkState:
        return TopkState()

    def reduce(self, state: TopkState, acc: Accumulator, comm: Comm) -> tuple[Reduced, TopkState]:
        transport, rank, size = comm.transport, comm.rank, comm.size
        offered = offer(acc, comm, state.local, exact=True)
        mine = offered.entries
        acc.clear(mine, mine)
        most = comm.wire.room(acc.k, acc.numel, added=1)
        distances = [2**level for level in range(math.ceil(math.log2(size)))]
        with comm.time("exchange"):
            for distance in distances:
                if rank % (2 * distance) == distance:
                    message, _ = _pack(acc, comm, mine)
                    transport.send(message, rank - distance)
                    break
                if rank + distance < size:
                    message = transport.receive(rank + distance, most)
                    theirs = _unpack(comm, message, rank + distance)
                    with comm.time("reduce"):
                        mine = _merge(acc, comm, mine, theirs)
        with comm.time("gather"):
            if rank == 0 and size > 1:
                message, mine = _pack(acc, comm, mine)
            for distance in reversed(distances):
                if rank % (2 * distance) == distance:
                    message = transport.receive(rank - distance, most)
                    mine = _unpack(comm, message, rank - distance)
                elif rank % (2 * distance) == 0 and rank + distance < size:
                    transport.send(message, rank + distance)
        threshold = float(mine.values.abs().min()) if len(mine) else 0.0
        count = len(offered.entries)
        reduced = Reduced(mine, acc.values, count, offered.threshold, threshold)
        return reduced, TopkState(state.steps + 1, offered.carried)

    def words(self, numel: int, size: int) -> float:
        """4k log2(P)"""
        return 4 * self.target(numel) * math.ceil(math.log2(size))


def _merge(acc: Accumulator, comm: Comm, mine: Entries, theirs: Entries) -> Entries:
    """The k largest of the sum; all others go back into this rank's residual."""
    merge = comm.kernels.merge
    total = Entries(*merge(mine.indices, mine.values, theirs.indices, theirs.values))
    if len(total) <= acc.k:
        return total
    kept, _ = keep_largest(total, acc.k)
    # total - kept is exactly zero where an entry was kept.
    dropped = Entries(*merge(total.indices, total.values, kept.indices, -kept.values))
    acc.add(dropped)
    comm.check(Entries(dropped.indices, acc.values[dropped.indices]))
    return kept


def _pack(acc: Accumulator, comm: Comm, entries: Entries) -> tuple[Tensor, Entries]:
    """A message, and the entries as its receiver reads them; this rank keeps rounding errors."""
    comm.check(entries)
    message, values = comm.wire.encode(entries, [comm.finite])
    if values is not entries.values:
        acc.add(Entries(entries.indices, entries.values - values))
    return message, Entries(entries.indices, values)


def _unpack(comm: Comm, message: Tensor, source: int) -> Entries:
    entries, (finite,) = comm.decode(message, source, added=1)
    comm.finite = comm.finite and bool(finite)
    return entries
