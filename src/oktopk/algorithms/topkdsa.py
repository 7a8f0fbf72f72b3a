"""TopkDSA: split and reduce, then an allgather that may turn dense (SparCML)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.select import keep, smallest
from ..wire.message import Entries, Wire, concatenate
from .base import Algorithm, Step
from .exchange import Region, gather, split


@dataclass(frozen=True)
class TopkDSA(Algorithm):
    """Each rank sums one region and sends all of it that is not zero to everyone.

    1. Accumulate, and select the k largest entries of this rank.
    2. Split and reduce: region j, the j-th of P equal parts, is summed by rank j.
    3. Allgather the sums. A region that is cheaper to send whole is sent whole.
    4. Clear what was offered and applied from the residual.
    """

    def reduce(self, step: Step) -> Entries:
        local = step.offer(exact=True)
        if step.transport.size == 1:
            step.clear(local, local)
            return local
        transport, numel = step.transport, step.accumulated.numel()
        regions = [numel * j // transport.size for j in range(transport.size + 1)]
        sent, region = split(step, local, regions)
        with step.time("reduce"):
            mine = region.select(step, 0.0)
            step.check(mine)
        with step.time("gather"):
            exact = Wire("plain", step.wire.index_dtype, step.wire.value_dtype)
            message, rounded = step.wire.encode(mine)
            whole = _whole(exact, mine, region, message.numel())
            if whole is not None:
                message, rounded = whole, mine.values
            # A region that is sent whole has a size that no list of entries has: a negative one.
            _, sizes = step.share(len(mine), message.numel() * (1 if whole is None else -1))
            wires = [exact if size < 0 else step.wire for size in sizes]
            lengths = [abs(size) for size in sizes]
            parts, _ = gather(step, mine, message, rounded, lengths, regions, wires=wires)
            # Without zeros, which only whole regions have.
            least = smallest(step.wire.value_dtype)
            applied = concatenate(
                [
                    part if size > 0 else keep(part, least, len(part))
                    for part, size in zip(parts, sizes, strict=True)
                ]
            )
        step.clear(sent, applied)
        step.keep_rounding(mine, rounded, applied)
        return applied

    def words(self, numel: int, size: int) -> float:
        """(2k + min(2kP, n))(P-1)/P"""
        k = self.target(numel)
        return (2 * k + min(2 * k * size, numel)) * (size - 1) / size


def _whole(exact: Wire, sums: Entries, region: Region, nbytes: int) -> Tensor | None:
    """A message with all sums of a region, zeros too, if it takes less than `nbytes`."""
    span = region.high - region.low
    if span * sums.values.itemsize >= nbytes:
        return None
    dense = sums.values.new_zeros(span)
    dense[(sums.indices - region.low).long()] = sums.values
    places = torch.arange(
        region.low, region.high, dtype=sums.indices.dtype, device=sums.indices.device
    )
    message, _ = exact.encode(Entries(places, dense))
    return message if message.numel() < nbytes else None
