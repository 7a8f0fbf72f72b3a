"""TopkDSA: split and reduce, then an allgather that may turn dense (SparCML)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..select import select
from ..wire import Entries, concatenate
from .base import Algorithm, Step
from .exchange import ROUNDS_IN_FLIGHT, Region, split


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
            message, rounded = step.wire.encode(mine)
            if whole := message.numel() > (region.high - region.low) * mine.values.itemsize:
                message, rounded = _whole(mine, region).view(torch.uint8), mine.values
            # A region sent whole has a size that no list of entries has: a negative one.
            _, sizes = step.share(len(mine), -message.numel() if whole else message.numel())
            parts = [mine[:0]] * transport.size
            parts[transport.rank] = Entries(mine.indices, rounded)
            messages = [message] * transport.size
            incoming = transport.exchange(messages, [abs(n) for n in sizes], ROUNDS_IN_FLIGHT)
            for source, received in incoming:
                if sizes[source] < 0:
                    found = select(received.view(step.wire.value_dtype), 0.0)
                    indices = found.indices.to(step.wire.index_dtype) + regions[source]
                    parts[source] = Entries(indices, found.values)
                else:
                    parts[source], _ = step.decode(received, source)
            applied = concatenate(parts)
        step.clear(sent, applied)
        step.keep_rounding(mine, rounded, applied)
        return applied

    def words(self, numel: int, size: int) -> float:
        """(2k + min(2kP, n))(P-1)/P"""
        k = self.target(numel)
        return (2 * k + min(2 * k * size, numel)) * (size - 1) / size


def _whole(sums: Entries, region: Region) -> Tensor:
    """The sums of a region, zeros too."""
    dense = sums.values.new_zeros(region.high - region.low)
    dense[(sums.indices - region.low).long()] = sums.values
    return dense
