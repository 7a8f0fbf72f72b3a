"""TopkDSA: split and reduce, then an allgather that may turn dense (SparCML)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import keep, smallest
from ..wire.message import Entries, Wire, concatenate
from .base import Algorithm, Reduced
from .exchange import Region, gather, split
from .offer import offer
from .topka import TopkState


@dataclass(frozen=True)
class TopkDSA(Algorithm[TopkState]):
    """Each rank sums one region and sends all of it that is not zero to everyone.

    1. Offer: accumulate, and select the k largest entries of this rank.
    2. Split and reduce: region j, the j-th of P equal parts, is summed by rank j.
    3. Allgather the sums. A region that is cheaper to send whole is sent whole.
    4. Clear the applied entries from the residual.
    """

    def init(self) -> TopkState:
        return TopkState()

    def reduce(self, state: TopkState, acc: Accumulator, comm: Comm) -> tuple[Reduced, TopkState]:
        offered = offer(acc, comm, state.local, exact=True)
        after = TopkState(state.steps + 1, offered.carried)
        regions: list[int] = []
        if comm.size == 1:
            sent = applied = mine = offered.entries
            rounded = mine.values
        else:
            regions = [acc.numel * j // comm.size for j in range(comm.size + 1)]
            sent, region = split(comm, offered.entries, regions)
            with comm.time("reduce"):
                mine = region.select(comm, 0.0)
                comm.check(mine)
            with comm.time("gather"):
                applied, rounded = _gather(comm, mine, region, regions)
        acc.clear(sent, applied)
        acc.keep_rounding(mine, rounded, applied)
        count, threshold = len(offered.entries), offered.threshold
        return Reduced(applied, acc.values, count, threshold, regions=tuple(regions)), after

    def words(self, numel: int, size: int) -> float:
        """(2k + min(2kP, n))(P-1)/P"""
        k = self.target(numel)
        return (2 * k + min(2 * k * size, numel)) * (size - 1) / size


def _gather(
    comm: Comm, mine: Entries, region: Region, regions: list[int]
) -> tuple[Entries, Tensor]:
    """Step 3: all sums, and this rank's own values as the others read them."""
    exact = Wire("plain", comm.wire.index_dtype, comm.wire.value_dtype)
    message, rounded = comm.wire.encode(mine)
    whole = _whole(exact, mine, region, message.numel())
    if whole is not None:
        message, rounded = whole, mine.values
    # A region that is sent whole has a size that no list of entries has: a negative one.
    _, sizes = comm.share(len(mine), message.numel() * (1 if whole is None else -1))
    wires = [exact if size < 0 else comm.wire for size in sizes]
    lengths = [abs(size) for size in sizes]
    parts = gather(comm, mine, message, rounded, lengths, regions, wires=wires)
    least = smallest(comm.wire.value_dtype)
    without_zeros = [  # only whole regions have zeros
        part if size > 0 else keep(part, least, len(part))
        for part, size in zip(parts, sizes, strict=True)
    ]
    return concatenate(without_zeros), rounded


def _whole(exact: Wire, sums: Entries, region: Region, nbytes: int) -> Tensor | None:
    """A message with all sums of a region, zeros too, if it takes less than `nbytes`."""
    span = region.high - region.low
    if span * sums.values.itemsize >= nbytes:
        return None
    dense = sums.values.new_zeros(span)
    dense[(sums.indices - region.low).long()] = sums.values
    everywhere = torch.arange(
        region.low, region.high, dtype=sums.indices.dtype, device=sums.indices.device
    )
    message, _ = exact.encode(Entries(everywhere, dense))
    return message if message.numel() < nbytes else None
