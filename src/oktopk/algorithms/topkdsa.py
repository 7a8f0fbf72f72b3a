"""TopkDSA: split and reduce, then an allgather that may turn dense (SparCML)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..wire import Entries, concatenate
from .base import Algorithm, Step
from .exchange import ROUNDS_IN_FLIGHT, select_region, split_reduce


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
        applied = local if step.transport.size == 1 else self._exchange(step, local)
        step.clear(local, applied)
        return applied

    def _exchange(self, step: Step, local: Entries) -> Entries:
        transport, wire, numel = step.transport, step.wire, step.accumulated.numel()
        regions = [numel * j // transport.size for j in range(transport.size + 1)]
        region = split_reduce(step, local, regions)
        low = regions[transport.rank]
        with step.time("gather"):
            mine = select_region(step, region, low, 0.0)
            whole = len(mine) * wire.entry_bytes > region.nbytes
            message = region.view(torch.uint8) if whole else wire.encode(mine)
            # A region sent whole has a size that no list of entries has: a negative one.
            sizes = step.share(-message.numel() if whole else message.numel())
            messages = [message] * transport.size
            parts = {transport.rank: mine}
            incoming = transport.exchange(messages, [abs(n) for n in sizes], ROUNDS_IN_FLIGHT)
            for source, received in incoming:
                if sizes[source] < 0:
                    sums = received.view(wire.value_dtype)
                    parts[source] = select_region(step, sums, regions[source], 0.0)
                else:
                    parts[source] = wire.decode(received)
            return concatenate([parts[source] for source in sorted(parts)])

    def words(self, numel: int, size: int) -> float:
        """(2k + min(2kP, n))(P-1)/P"""
        k = self.target(numel)
        return (2 * k + min(2 * k * size, numel)) * (size - 1) / size
