"""gTopk: a tree of pairwise merges that keep k entries each, then a broadcast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.select import keep_largest
from ..wire.message import Entries
from .base import Algorithm, Step


@dataclass(frozen=True)
class GTopk(Algorithm):
    """Merge the ranks' entries two by two; only k survive each merge.

    1. Accumulate, take the k largest entries of this rank out of the residual.
    2. For distance 1, 2, 4 ...: a rank at an odd multiple of the distance sends its entries to
       the rank that far below and is done; that rank adds them to its own and keeps the k
       largest. What a merge drops goes into the merging rank's residual. Any P works: a rank
       without a partner waits for the next distance.
    3. Rank 0 holds the result; it goes back through the tree.
    """

    def reduce(self, step: Step) -> Entries:
        transport, rank, size = step.transport, step.transport.rank, step.transport.size
        mine = step.offer(exact=True)
        step.clear(mine, mine)
        most = step.wire.room(step.target, step.accumulated.numel(), added=1)
        distances = [2**level for level in range(math.ceil(math.log2(size)))]
        with step.time("exchange"):
            for distance in distances:
                if rank % (2 * distance) == distance:
                    message, _ = self._pack(step, mine)
                    transport.send(message, rank - distance)
                    break
                if rank + distance < size:
                    message = transport.receive(rank + distance, most)
                    theirs = self._unpack(step, message, rank + distance)
                    with step.time("reduce"):
                        mine = self._merge(step, mine, theirs)
        with step.time("gather"):
            if rank == 0 and size > 1:
                message, mine = self._pack(step, mine)
            for distance in reversed(distances):
                if rank % (2 * distance) == distance:
                    message = transport.receive(rank - distance, most)
                    mine = self._unpack(step, message, rank - distance)
                elif rank % (2 * distance) == 0 and rank + distance < size:
                    transport.send(message, rank + distance)
        if len(mine):
            step.global_threshold = float(mine.values.abs().min())
        return mine

    def _merge(self, step: Step, mine: Entries, theirs: Entries) -> Entries:
        """The k largest of the sum; all others go back into this rank's residual."""
        merge = step.kernels.merge
        total = Entries(*merge(mine.indices, mine.values, theirs.indices, theirs.values))
        if len(total) <= step.target:
            return total
        kept, _ = keep_largest(total, step.target)
        # total - kept is exactly zero where an entry was kept.
        dropped = merge(total.indices, total.values, kept.indices, -kept.values)
        step.kernels.add_at(step.accumulated, *dropped)
        step.check(Entries(dropped[0], step.accumulated[dropped[0]]))
        return kept

    def _pack(self, step: Step, entries: Entries) -> tuple[Tensor, Entries]:
        """A message, and what it says; what rounding cost stays in this rank's residual."""
        step.check(entries)
        message, values = step.wire.encode(entries, [step.finite])
        if values is not entries.values:
            step.kernels.add_at(step.accumulated, entries.indices, entries.values - values)
        return message, Entries(entries.indices, values)

    def _unpack(self, step: Step, message: Tensor, source: int) -> Entries:
        entries, (finite,) = step.decode(message, source, added=1)
        step.finite = step.finite and bool(finite)
        return entries

    def words(self, numel: int, size: int) -> float:
        """4k log2(P)"""
        return 4 * self.target(numel) * math.ceil(math.log2(size))
